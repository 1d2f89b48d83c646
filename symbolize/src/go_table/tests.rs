use super::*;

const TEXT: u64 = 0x40_1000;
const TABLE: u64 = 0x50_0000;
const TREE: u64 = 0x60_0040;
const FUNCTION_DATA: u64 = 0x60_0000;

/// Pairs of a value and the bytes that it is valid for.
type Values = &'static [(i32, u32)];

struct Function {
    name: &'static str,
    size: u64,
    flags: u8,
    stack: Values,
    files: Values,
    lines: Values,
    inlined: Values,
}

const FUNCTIONS: [Function; 4] = [
    Function {
        name: "runtime.goexit",
        size: 16,
        flags: TOP_FRAME,
        stack: &[(0, 16)],
        files: &[(0, 16)],
        lines: &[(7, 16)],
        inlined: &[],
    },
    Function {
        name: "main.run",
        size: 64,
        flags: 0,
        stack: &[(0, 4), (40, 56), (0, 4)],
        // From 16 on a function of the other file, in which another one is inlined from 24 on.
        files: &[(0, 16), (1, 24), (0, 24)],
        lines: &[(10, 16), (200, 8), (300, 16), (12, 24)],
        inlined: &[(-1, 16), (0, 8), (1, 16), (-1, 24)],
    },
    Function {
        name: "runtime.systemstack",
        size: 32,
        flags: WRITES_SP,
        stack: &[(0, 32)],
        files: &[(-1, 32)],
        lines: &[(-1, 32)],
        inlined: &[],
    },
    Function {
        name: "main.last",
        size: 16,
        flags: WRITES_SP,
        stack: &[],
        files: &[],
        lines: &[],
        inlined: &[],
    },
];

fn number(mut value: u32, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// The parts of a table, each appended to.
struct Builder {
    parts: [Vec<u8>; 5],
}

impl Builder {
    fn push(&mut self, part: usize, bytes: &[u8]) -> u32 {
        let at = self.parts[part].len() as u32;
        self.parts[part].extend(bytes);
        at
    }

    fn values(&mut self, values: Values) -> u32 {
        if values.is_empty() {
            return 0;
        }
        let (mut bytes, mut last) = (Vec::new(), -1);
        for (value, size) in values {
            let by = value - last;
            number(((by << 1) ^ (by >> 31)) as u32, &mut bytes);
            number(*size, &mut bytes);
            last = *value;
        }
        bytes.push(0);
        self.push(VALUES, &bytes)
    }

    fn name(&mut self, name: &str) -> u32 {
        self.push(NAMES, format!("{name}\0").as_bytes())
    }
}

const NAMES: usize = 0;
const UNITS: usize = 1;
const FILES: usize = 2;
const VALUES: usize = 3;
const DESCRIPTIONS: usize = 4;

/// A table, and the list of inlined calls.
fn table(version: Version, text: u64) -> (Vec<u8>, Vec<u8>) {
    let mut b = Builder {
        parts: Default::default(),
    };
    // Offset 0 means none.
    b.parts[VALUES].push(0);
    b.parts[NAMES].push(0);
    let files = [b.push(FILES, b"/src/main.go\0"), b.push(FILES, b"/go/strings.go\0")];
    b.push(UNITS, &[9; 8]);
    for file in files {
        b.push(UNITS, &file.to_le_bytes());
    }
    let mut tree = Vec::new();
    for (name, call) in [("strings.Count", 8u32), ("strings.one", 20)] {
        let name = b.name(name);
        let words = match version {
            Version::Go1_20 => vec![0, name, call, 5],
            _ => vec![0, 0, 0, name, call],
        };
        tree.extend(words.into_iter().flat_map(u32::to_le_bytes));
    }
    let (mut list, mut start) = (Vec::new(), 0u64);
    let absolute = if version == Version::Go1_16 { TEXT } else { 0 };
    let entry = |value: u64, out: &mut Vec<u8>| match version {
        Version::Go1_16 => out.extend(value.to_le_bytes()),
        _ => out.extend((value as u32).to_le_bytes()),
    };
    let half = if version == Version::Go1_16 { 8 } else { 4 };
    let size_of_list = half * (2 * FUNCTIONS.len() + 1);
    for f in &FUNCTIONS {
        entry(start + absolute, &mut list);
        entry((size_of_list + b.parts[DESCRIPTIONS].len()) as u64, &mut list);
        let name = b.name(f.name);
        let [stack, file, line, inlined] = [f.stack, f.files, f.lines, f.inlined].map(|values| b.values(values));
        let mut description = Vec::new();
        entry(start + absolute, &mut description);
        let mut words = vec![name, 0, 0, stack, file, line, 3, 2];
        if version == Version::Go1_20 {
            words.push(1);
        }
        description.extend(words.into_iter().flat_map(u32::to_le_bytes));
        description.extend([0, f.flags, 0, 4]);
        let tree = if f.inlined.is_empty() {
            NOTHING
        } else {
            (TREE - FUNCTION_DATA) as u32
        };
        for word in [0, 0, inlined, NOTHING, NOTHING, NOTHING, tree] {
            description.extend(word.to_le_bytes());
        }
        b.push(DESCRIPTIONS, &description);
        start += f.size;
    }
    entry(start + absolute, &mut list);
    let magic: u32 = match version {
        Version::Go1_16 => 0xffff_fffa,
        Version::Go1_18 => 0xffff_fff0,
        Version::Go1_20 => 0xffff_fff1,
    };
    let mut bytes = magic.to_le_bytes().to_vec();
    bytes.extend([0, 0, 1, 8]);
    let mut words = vec![FUNCTIONS.len() as u64, 2];
    if version != Version::Go1_16 {
        words.push(text);
    }
    let mut at = 8 + 8 * (words.len() + 5);
    for part in &b.parts {
        words.push(at as u64);
        at += part.len();
    }
    bytes.extend(words.into_iter().flat_map(u64::to_le_bytes));
    b.parts[DESCRIPTIONS].splice(0..0, list);
    b.parts.iter().for_each(|part| bytes.extend(part));
    (bytes, tree)
}

/// `moduledata` behind other words.
fn module_data(bytes: &[u8], version: Version) -> Vec<u8> {
    let mut data = vec![0; 8 * 64];
    let mut put = |i: usize, word: u64| data[8 * (3 + i)..8 * (4 + i)].copy_from_slice(&word.to_le_bytes());
    put(0, TABLE);
    let skip = usize::from(version != Version::Go1_16);
    put(1, TABLE + u64_at(bytes, 8 * (3 + skip)).expect("an offset"));
    put(22, TEXT);
    put(if version == Version::Go1_20 { 40 } else { 38 }, FUNCTION_DATA);
    data
}

fn parse(version: Version, text_in_header: u64, with_data: bool) -> (Option<GoTable>, Vec<u8>) {
    let (bytes, tree) = table(version, text_in_header);
    let data = module_data(&bytes, version);
    let sections = GoSections {
        table: TABLE,
        text: (TEXT, 128),
        data: if with_data { &data } else { &[] },
    };
    (GoTable::parse(bytes, &sections), tree)
}

const ALL: [Version; 3] = [Version::Go1_16, Version::Go1_18, Version::Go1_20];

#[test]
fn functions_are_found() {
    for version in ALL {
        let (table, _) = parse(version, TEXT, true);
        let table = table.expect("a table");
        assert_eq!(table.range(), (TEXT, TEXT + 128));
        let mut at = TEXT;
        for f in &FUNCTIONS {
            for svma in [at, at + f.size - 1] {
                let found = table.find(svma).expect("a function");
                assert_eq!((found.start, found.end), (at, at + f.size), "{version:?} {svma:x}");
                assert_eq!(found.name().expect("a name"), f.name);
            }
            at += f.size;
        }
        assert!(table.find(at).is_none() && table.find(TEXT - 1).is_none());
        let [first, run, switch, last] = [0, 16, 80, 112].map(|by| table.find(TEXT + by).expect("a function"));
        assert!(first.is_first() && !run.is_first() && !last.is_first(), "{version:?}");
        assert!(switch.switches_stacks() && !run.switches_stacks(), "{version:?}");
        assert!(last.writes_stack_pointer() && !last.switches_stacks(), "{version:?}");
        let sizes = [0, 3, 4, 59, 60, 63].map(|by| run.stack_size(run.start + by));
        assert_eq!(sizes, [0, 0, 40, 40, 0, 0].map(Some), "{version:?}");
        assert_eq!((run.stack_size(run.end), last.stack_size(last.start)), (None, None));
    }
}

#[test]
fn inlined_functions_have_frames() {
    for version in ALL {
        let (table, tree) = parse(version, TEXT, true);
        let table = table.expect("a table");
        let mut read = |at: u64, len: u64| {
            let from = at.checked_sub(TREE)? as usize;
            tree.get(from..from + len as usize).map(<[u8]>::to_vec)
        };
        let mut frames = |by: u64| -> Vec<String> {
            let run = table.find(TEXT + 16).expect("a function");
            let all = run.frames(run.start + by, &mut read);
            let shown = |f: &GoFrame<'_>| {
                let (file, line) = (f.file.clone().unwrap_or("-".into()), f.line.unwrap_or(0));
                format!("{} {file}:{line}", f.name)
            };
            all.iter().map(shown).collect()
        };
        let outer = "main.run /src/main.go:10";
        assert_eq!(frames(0), [outer], "{version:?}");
        assert_eq!(frames(45), ["main.run /src/main.go:12"], "{version:?}");
        if version == Version::Go1_16 {
            // Without the names of inlined functions there is no line.
            assert_eq!(frames(17), ["main.run -:0"]);
            continue;
        }
        let middle = "strings.Count /go/strings.go:200";
        assert_eq!(frames(17), [middle, outer], "{version:?}");
        assert_eq!(
            frames(30),
            ["strings.one /go/strings.go:300", middle, outer],
            "{version:?}"
        );
        let (table, _) = parse(version, TEXT, false);
        let table = table.expect("a table");
        let run = table.find(TEXT + 16).expect("a function");
        assert_eq!(
            run.frames(run.start + 17, &mut |_, _| None)[0].line,
            None,
            "{version:?}"
        );
    }
}

#[test]
fn the_address_of_the_code_is_certain_or_there_is_no_table() {
    let text = |header, with_data, section| {
        let (bytes, _) = table(Version::Go1_20, header);
        let data = module_data(&bytes, Version::Go1_20);
        let sections = GoSections {
            table: TABLE,
            text: section,
            data: if with_data { &data } else { &[] },
        };
        GoTable::parse(bytes, &sections).map(|table| table.range().0)
    };
    assert_eq!(text(TEXT, false, (0, 0)), Some(TEXT));
    assert_eq!(text(0, true, (0, 0)), Some(TEXT));
    assert_eq!(text(0, false, (TEXT, 130)), Some(TEXT));
    // Other code is in the section, too: it may come first.
    assert_eq!(text(0, false, (TEXT, 1000)), None);
    assert_eq!(text(0, false, (TEXT, 100)), None);
}

#[test]
fn damaged_tables_do_no_harm() {
    for version in ALL {
        let (bytes, _) = table(version, TEXT);
        let sections = GoSections {
            table: TABLE,
            text: (TEXT, 128),
            data: &[],
        };
        let visit = |bytes: Vec<u8>| {
            let Some(table) = GoTable::parse(bytes, &sections) else {
                return;
            };
            for svma in (TEXT - 8..TEXT + 140).step_by(3) {
                if let Some(f) = table.find(svma) {
                    let _ = (f.name(), f.is_first(), f.switches_stacks(), f.stack_size(svma));
                    f.frames(svma, &mut |_, len| Some(vec![1; len as usize]));
                }
            }
        };
        for len in 0..bytes.len() {
            visit(bytes[..len].to_vec());
        }
        for i in 0..bytes.len() {
            for value in [0, 1, 0x7f, 0xff] {
                let mut damaged = bytes.clone();
                damaged[i] = value;
                visit(damaged);
            }
        }
    }
}
