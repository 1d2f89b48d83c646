use super::*;
use crate::code_map::Sections;
use crate::process::system::LiveSystem;

#[test]
fn the_limit_of_open_files_is_kept() {
    let mut modules = Modules {
        max_open: 1,
        ..Modules::default()
    };
    let this = std::env::current_exe().expect("a path");
    let libc = std::fs::read_to_string("/proc/self/maps").expect("readable");
    let libc = libc
        .split_whitespace()
        .find(|w| w.contains("/libc.so"))
        .expect("the C library");
    let mut open = |path: &[u8]| {
        let pid = std::process::id();
        modules.open_ahead(&LiveSystem, pid, 0, 0, path, None);
        let (id, new) = modules.open(&LiveSystem, pid, 0, 0, path, None);
        let module = modules.get(id);
        (new, module.is_file, module.refused.is_some(), module.content.is_empty())
    };
    let this = this.as_os_str().as_encoded_bytes();
    assert_eq!(open(this), (true, true, false, false));
    assert_eq!(open(libc.as_bytes()), (true, true, true, true));
    assert_eq!(open(this), (false, true, false, false));
    modules.forget_ahead();
    assert_eq!(modules.open, 1);
}

#[test]
fn one_process_of_many_has_a_part_of_the_files() {
    let mut modules = Modules::of_many_processes();
    let most = modules.max_of_one;
    assert!(most < modules.max_open && modules.refused(most - 1, b"/a").is_none());
    let (id, is_new) = modules.refused(most, b"/a").expect("it has its part");
    let module = modules.get(id);
    assert!(is_new && module.is_file && module.refused.is_some());
    assert_eq!(modules.refused(most, b"/a"), Some((id, false)));
    assert_eq!(Modules::default().refused(most, b"/a"), None);
}

#[test]
fn files_of_mappings_are_known_without_opening_them_again() {
    let text = std::fs::read("/proc/self/maps").expect("readable");
    let program = crate::process::maps::parse(&text).remove(0);
    let mut modules = Modules::default();
    let mapped = |modules: &Modules, path: &[u8]| modules.mapped(&LiveSystem, program.device, program.inode, path);
    assert_eq!(mapped(&modules, &program.path), None);
    let (start, end) = (program.start, program.end);
    let (id, _) = modules.open(&LiveSystem, std::process::id(), start, end, &program.path, None);
    assert_eq!(mapped(&modules, &program.path), Some(id));
    // The number of a file that is not kept open may belong to another one.
    modules.all[id.0 as usize] = Arc::new(Module::missing(program.path.clone(), None));
    assert_eq!(mapped(&modules, &program.path), Some(id));
    assert_eq!(mapped(&modules, b"/other"), None);
}

#[test]
fn a_process_that_cannot_be_read_does_not_spoil_the_code_of_the_kernel() {
    let text = std::fs::read("/proc/self/maps").expect("readable");
    let vdso = crate::process::maps::parse(&text);
    let vdso = vdso.iter().find(|mapping| mapping.path == VDSO);
    let vdso = vdso.expect("this kernel has one");
    let mut modules = Modules::default();
    let mut is_file = |pid, end| {
        let (id, _) = modules.open(&LiveSystem, pid, vdso.start, end, VDSO, None);
        modules.get(id).is_file
    };
    let (other, own) = (0x7fff_ffff, std::process::id());
    assert!(!is_file(other, vdso.end) && !is_file(other, vdso.end));
    assert!(is_file(own, vdso.end));
    assert!(is_file(other, vdso.end), "it is the same everywhere");
    assert_eq!(modules.len(), 2);
}

#[test]
fn names_of_files_that_are_not_utf8_stay_different() {
    for (path, name, text) in [
        (b"/opt/libplain.so".as_slice(), "libplain.so", "/opt/libplain.so"),
        ("/opt/libé.so".as_bytes(), "libé.so", "/opt/libé.so"),
        (b"/opt/lib\xe9.so", r"lib\udce9.so", r"/opt/lib\udce9.so"),
        (b"/opt/lib\xe8.so", r"lib\udce8.so", r"/opt/lib\udce8.so"),
        (br"/opt/lib\udce8.so", r"lib\x5cudce8.so", r"/opt/lib\x5cudce8.so"),
        (b"/caf\xe9/lib.so (deleted)", "lib.so", r"/caf\udce9/lib.so (deleted)"),
    ] {
        let module = Module::missing(path.to_vec(), None);
        assert_eq!((module.name().as_str(), module.path_text().as_str()), (name, text));
        // What reads the file for a report finds it again.
        assert_eq!(escape::name_bytes(text), path);
    }
}

#[test]
fn names_are_compared_to_their_end() {
    let strings = b"\0_PyRuntimeX\0_PyRuntime\0tail".to_vec();
    let symbol = |name: u32, section: u16, at: u64| {
        let mut s = name.to_le_bytes().to_vec();
        s.extend([0x11, 0]);
        s.extend(section.to_le_bytes());
        s.extend(at.to_le_bytes());
        s.extend(8u64.to_le_bytes());
        s
    };
    let table = [
        symbol(1, 1, 1),
        symbol(13, 0, 2),
        symbol(13, 1, 3),
        symbol(24, 1, 4),
        symbol(900, 1, 5),
    ];
    let names = SymbolTable {
        table: table.concat(),
        strings,
    };
    for (wanted, at) in [
        ("_PyRuntime", Some(3)),
        ("_PyRun", None),
        ("tail", Some(4)),
        ("other", None),
    ] {
        assert_eq!(names.find(wanted.as_bytes()), at, "{wanted}");
    }
}

#[test]
fn a_page_of_the_file_that_two_segments_share() {
    let segment = |offset, svma, size| Segment { offset, svma, size };
    let module = |segments: &[Segment]| Module {
        segments: segments.to_vec(),
        ..Module::missing(b"/a.so".to_vec(), None)
    };
    // As lld links: addresses go on where the file does, one page higher.
    let shared = module(&[segment(0x1500, 0x2500, 0x900), segment(0x1e00, 0x3e00, 0x300)]);
    let bias = |start, end, offset, known: &[u64]| shared.bias(start, end, offset, |bias| known.contains(&bias));
    for (start, end, offset, known, expected) in [
        // The first segment by what is known, or since it comes first.
        (0x7_2000, 0x7_3000, 0x1000, &[][..], Some(0x7_0000)),
        (0x7_2000, 0x7_3000, 0x1000, &[0x7_0000], Some(0x7_0000)),
        // The second by what is known, or by its length.
        (0x7_3000, 0x7_4000, 0x1000, &[0x7_0000], Some(0x7_0000)),
        (0x7_3000, 0x7_5000, 0x1000, &[], Some(0x7_0000)),
        (0x7_4000, 0x7_5000, 0x2000, &[], Some(0x7_0000)),
        (0x7_4000, 0x7_5000, 0x3000, &[], None),
    ] {
        assert_eq!(
            bias(start, end, offset, known),
            expected,
            "{start:#x} {offset:#x} {known:x?}"
        );
    }
    for (start, end, expected) in [
        (0x7_2000, 0x7_3000, true),
        (0x7_3000, 0x7_5000, true),
        (0x7_2000, 0x7_4000, false),
        (0x7_1000, 0x7_3000, false),
        (0x7_4000, 0x7_6000, false),
    ] {
        assert_eq!(shared.has_code(0x7_0000, start, end), expected, "{start:#x} {end:#x}");
    }
}

#[test]
fn files_without_section_headers_are_read_by_their_segments() {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("readable");
    let libc = maps.split_whitespace().find(|w| w.contains("/libc.so"));
    let mut bytes = std::fs::read(libc.expect("the C library")).expect("readable");
    let module = |bytes: &[u8]| {
        let content = Content::Bytes(Arc::new(bytes.to_vec().into()));
        Arc::new(Module::new(b"/libc.so".to_vec(), content))
    };
    let whole = module(&bytes);
    // e_shoff; e_shentsize, e_shnum, e_shstrndx
    bytes[40..48].fill(0);
    bytes[58..64].fill(0);
    let bare = module(&bytes);
    let malloc = whole.exports("malloc").expect("exported");
    assert_eq!(bare.exports("malloc"), Some(malloc));
    let (mut whole, mut bare) = (ModuleSections(whole), ModuleSections(bare));
    let mut both = |name: &str| [&mut whole, &mut bare].map(|s| s.section(name).expect("a section"));
    for name in [".eh_frame_hdr", ".eh_frame", ".dynstr"] {
        let [expected, found] = both(name);
        assert_eq!(found.svma, expected.svma, "{name}");
        assert!(found.bytes.starts_with(&expected.bytes), "{name}");
    }
    let functions = bare.functions();
    assert!(whole.functions().iter().all(|f| functions.binary_search(f).is_ok()));
    let [expected, found] = [whole.code(malloc), bare.code(malloc)].map(|code| code.expect("code"));
    assert_eq!(
        found.from(malloc).map(|c| &c[..64]),
        expected.from(malloc).map(|c| &c[..64])
    );
    assert!(bare.section(".debug_frame").is_none() && bare.code(0).is_none());
}
