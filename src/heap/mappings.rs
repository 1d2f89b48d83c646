//! Divides the resident memory of a process into parts that sum to it.
//!
//! Each mapping's resident bytes come from `smaps`. What is known of ranges inside of mappings (arenas, stacks) comes
//! in as [`Claim`]s; what no claim covers is of the mapping's kind. The process runs meanwhile, so the pages of a claim,
//! which are looked up a little later, may be more than the mapping had: then all of its claims are reduced in
//! proportion.

use std::collections::BTreeMap;
use std::ops::Range;

use super::present::Present;
use crate::process::smaps::{Area, Smaps};

/// Largest anonymous mapping behind the data of a file that is taken for its uninitialized data, bytes.
const MAX_BSS: u64 = 1 << 20;

/// What memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// Blocks in use of Python's own allocator: objects, and what they own.
    PythonObjects,
    /// Free blocks in its pools that have others in use.
    PythonFreeBlocks,
    /// Pools without blocks in use.
    PythonFreePools,
    /// Python's arenas, where they cannot be divided further.
    PythonArenas,
    /// Chunks of the C library in use.
    CInUse,
    /// Free chunks that it keeps.
    CFree,
    /// Chunks that it has in mappings of their own.
    CLarge,
    /// Its heap, where that cannot be divided.
    CHeap,
    Stacks,
    /// Pages of files that no other process has: data that was written, and files that this process alone reads.
    FilesPrivate,
    FilesShared,
    /// Mappings of programs and other allocators.
    Anonymous,
    /// Mappings of the kernel: the vDSO.
    Kernel,
    /// What could not be read.
    Unknown,
}

impl Part {
    /// All, in the order in which they are shown.
    pub const ALL: [Part; 14] = [
        Part::PythonObjects,
        Part::PythonFreeBlocks,
        Part::PythonFreePools,
        Part::PythonArenas,
        Part::CInUse,
        Part::CFree,
        Part::CLarge,
        Part::CHeap,
        Part::Stacks,
        Part::FilesPrivate,
        Part::FilesShared,
        Part::Anonymous,
        Part::Kernel,
        Part::Unknown,
    ];

    /// Its name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Part::PythonObjects => "python_objects",
            Part::PythonFreeBlocks => "python_free_blocks",
            Part::PythonFreePools => "python_free_pools",
            Part::PythonArenas => "python_arenas",
            Part::CInUse => "c_in_use",
            Part::CFree => "c_free",
            Part::CLarge => "c_large",
            Part::CHeap => "c_heap",
            Part::Stacks => "stacks",
            Part::FilesPrivate => "files_private",
            Part::FilesShared => "files_shared",
            Part::Anonymous => "anonymous",
            Part::Kernel => "kernel",
            Part::Unknown => "unknown",
        }
    }

    /// Its name in text.
    pub fn text(self) -> &'static str {
        match self {
            Part::PythonObjects => "Python: objects and what they own",
            Part::PythonFreeBlocks => "Python: free blocks in pools in use",
            Part::PythonFreePools => "Python: free pools",
            Part::PythonArenas => "Python: arenas",
            Part::CInUse => "C heap: in use",
            Part::CFree => "C heap: free but kept",
            Part::CLarge => "C heap: large blocks, mapped one by one",
            Part::CHeap => "C heap, not divided",
            Part::Stacks => "thread stacks",
            Part::FilesPrivate => "files: private pages",
            Part::FilesShared => "files: shared pages",
            Part::Anonymous => "other anonymous memory",
            Part::Kernel => "the kernel's own mappings",
            Part::Unknown => "unknown",
        }
    }
}

/// Resident bytes by part.
pub type Amounts = BTreeMap<Part, u64>;

/// What a range of addresses is.
#[derive(Clone, Debug)]
pub struct Claim {
    pub range: Range<u64>,
    /// Resident bytes by part. Those of the range that are in none are of the first part.
    pub amounts: Vec<(Part, u64)>,
}

impl Claim {
    /// All of the range is this part.
    pub fn whole(range: Range<u64>, part: Part) -> Claim {
        Claim {
            range,
            amounts: vec![(part, 0)],
        }
    }
}

/// A file, or a kind of anonymous memory that has a name, with its resident bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileUse {
    pub name: Vec<u8>,
    pub private: u64,
    pub shared: u64,
}

/// An anonymous mapping, with what of it is in no other part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnonymousUse {
    pub range: Range<u64>,
    /// The name that the program has given it; usually empty.
    pub name: Vec<u8>,
    pub rss: u64,
}

/// The account of a process's resident memory, bytes.
#[derive(Clone, Debug, Default)]
pub struct Account {
    pub rss: u64,
    pub swap: u64,
    /// The part of `rss` that no other process has.
    pub private: u64,
    /// Huge pages of hugetlbfs, which are not resident memory to the kernel.
    pub hugetlb: u64,
    /// They sum to `rss`.
    pub parts: Amounts,
    /// Largest first.
    pub files: Vec<FileUse>,
    /// Largest first.
    pub anonymous: Vec<AnonymousUse>,
}

/// Divides what is resident. Claims that overlap an earlier one are left out.
pub fn divide(smaps: &Smaps, present: &Present, mut claims: Vec<Claim>) -> Account {
    claims.sort_by_key(|claim| claim.range.start);
    let mut end = 0;
    claims.retain(|claim| {
        let is_new = claim.range.start >= end;
        end = end.max(claim.range.end);
        is_new
    });
    let mut claims: Vec<Claimed> = claims.into_iter().map(|claim| Claimed::of(claim, present)).collect();
    let mut account = Account {
        rss: smaps.total.rss,
        swap: smaps.total.swap,
        private: smaps.total.private,
        hugetlb: smaps.total.hugetlb,
        ..Account::default()
    };
    let mut files: BTreeMap<&[u8], (u64, u64)> = BTreeMap::new();
    let mut first = 0;
    for (index, area) in smaps.areas.iter().enumerate() {
        while claims
            .get(first)
            .is_some_and(|claimed| claimed.claim.range.end <= area.start)
        {
            first += 1;
        }
        let inside = claims.iter_mut().skip(first);
        let inside = inside.take_while(|claimed| claimed.claim.range.start < area.end);
        let claimed = claimed(area, present, inside);
        let rest = area.usage.rss - claimed.values().sum::<u64>();
        claimed.into_iter().for_each(|(part, bytes)| account.add(part, bytes));
        match kind(smaps, area, smaps.file_before(index)) {
            AreaKind::File(name) => {
                let private = area.usage.private.min(rest);
                account.add(Part::FilesPrivate, private);
                account.add(Part::FilesShared, rest - private);
                let sums = files.entry(name).or_default();
                *sums = (sums.0 + private, sums.1 + rest - private);
            }
            AreaKind::Anonymous if rest > 0 => {
                account.add(Part::Anonymous, rest);
                account.anonymous.push(AnonymousUse {
                    range: area.start..area.end,
                    name: smaps.name(area).to_vec(),
                    rss: rest,
                });
            }
            AreaKind::Anonymous => {}
            AreaKind::Other(part) => account.add(part, rest),
        }
    }
    account.add(Part::Unknown, smaps.uncounted.rss);
    let files = files.into_iter().filter(|(_, (private, shared))| private + shared > 0);
    account.files = files
        .map(|(name, (private, shared))| FileUse {
            name: name.to_vec(),
            private,
            shared,
        })
        .collect();
    account
        .files
        .sort_by_key(|file| std::cmp::Reverse(file.private + file.shared));
    account.anonymous.sort_by_key(|area| std::cmp::Reverse(area.rss));
    account
}

impl Account {
    /// Divides what Python's arenas have among these parts, in proportion.
    pub fn split_arenas(&mut self, parts: [(Part, u64); 3]) {
        let all: u64 = parts.iter().fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes));
        let Some(arenas) = self.parts.remove(&Part::PythonArenas) else {
            return;
        };
        let mut left = arenas;
        for (part, bytes) in parts {
            let bytes = scaled(bytes, arenas, all).min(left);
            left -= bytes;
            self.add(part, bytes);
        }
        // What rounding leaves, or all of it if nothing is known of the parts.
        self.add(
            if all > 0 {
                Part::PythonObjects
            } else {
                Part::PythonArenas
            },
            left,
        );
    }

    fn add(&mut self, part: Part, bytes: u64) {
        if bytes > 0 {
            *self.parts.entry(part).or_default() += bytes;
        }
    }
}

/// A claim, which may reach over many areas.
struct Claimed {
    claim: Claim,
    /// Bytes of its range that are in memory.
    all: u64,
    /// Those of them in areas that have been divided.
    divided: u64,
    /// The sum of its amounts.
    named: u64,
}

impl Claimed {
    fn of(claim: Claim, present: &Present) -> Claimed {
        let amounts = claim.amounts.iter();
        Claimed {
            all: present.bytes_in(claim.range.clone()),
            named: amounts.fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes)),
            claim,
            divided: 0,
        }
    }
}

/// What claims say of an area, at most its resident bytes.
fn claimed<'a>(area: &Area, present: &Present, claims: impl Iterator<Item = &'a mut Claimed>) -> Amounts {
    let mut amounts = Amounts::new();
    for Claimed {
        claim,
        all,
        named,
        divided,
    } in claims
    {
        let (all, named) = (*all, *named);
        let Range { start, end } = claim.range.start.max(area.start)..claim.range.end.min(area.end);
        let Some(((first, _), others)) = claim.amounts.split_first() else {
            continue;
        };
        let mut left = present.bytes_in(start..end);
        // Of the area and of those before it, so that nothing is lost by rounding.
        let before = *divided;
        *divided += left;
        let until_here = *divided;
        for (part, bytes) in others {
            let of_first = |present: u64| scaled(*bytes, present, all.max(named));
            let bytes = (of_first(until_here) - of_first(before)).min(left);
            left -= bytes;
            *amounts.entry(*part).or_default() += bytes;
        }
        // With what is in no part.
        *amounts.entry(*first).or_default() += left;
    }
    let sum: u64 = amounts.values().sum();
    if sum > area.usage.rss {
        let mut left = area.usage.rss;
        for bytes in amounts.values_mut() {
            *bytes = scaled(*bytes, area.usage.rss, sum);
            left -= *bytes;
        }
        if let Some(bytes) = amounts.values_mut().next() {
            *bytes += left;
        }
    }
    amounts
}

/// `bytes * part / all`, rounded down; 0 of nothing.
fn scaled(bytes: u64, part: u64, all: u64) -> u64 {
    let product = u128::from(bytes) * u128::from(part);
    product.checked_div(u128::from(all)).map_or(0, |n| n as u64)
}

enum AreaKind<'a> {
    File(&'a [u8]),
    Anonymous,
    Other(Part),
}

/// `file_before`: [`Smaps::file_before`] of the area.
fn kind<'a>(smaps: &'a Smaps, area: &Area, file_before: Option<&'a Area>) -> AreaKind<'a> {
    let name = smaps.name(area);
    if area.is_file {
        return AreaKind::File(name);
    }
    match name {
        b"[heap]" => AreaKind::Other(Part::CHeap),
        b"[stack]" => AreaKind::Other(Part::Stacks),
        // [vvar], [vsyscall], [uprobes] and others; names of programs' own begin with `[anon`.
        [b'[', rest @ ..] if !rest.starts_with(b"anon") => AreaKind::Other(Part::Kernel),
        _ => match file_before {
            Some(data) if data.is_writable && area.is_writable && area.end - area.start <= MAX_BSS => {
                AreaKind::File(smaps.name(data))
            }
            _ => AreaKind::Anonymous,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &[u8] = b"10000-20000 r-xp 0 fd:01 7 /bin/x\nRss: 16 kB\nPrivate_Clean: 4 kB\n\
        20000-24000 rw-p 0 fd:01 7 /bin/x\nRss: 16 kB\nPrivate_Dirty: 16 kB\n\
        24000-26000 rw-p 0 00:00 0\nRss: 8 kB\nPrivate_Dirty: 8 kB\n\
        30000-40000 rw-p 0 00:00 0 [heap]\nRss: 64 kB\n\
        100000-200000 rw-p 0 00:00 0\nRss: 512 kB\nSwap: 12 kB\n\
        300000-301000 rw-p 0 00:00 0 [anon:mine]\nRss: 4 kB\nPrivate_Hugetlb: 2048 kB\n\
        400000-401000 r-xp 0 00:00 0 [vdso]\nRss: 4 kB\n\
        500000-521000 rw-p 0 00:00 0 [stack]\nRss: 40 kB\n\
        1000-2000 rw-p 0 00:00 0\nRss: 12 kB\n";

    #[track_caller]
    fn check(present: &[Range<u64>], claims: &[Claim], expected: &[(Part, u64)]) -> Account {
        let smaps = Smaps::read(TEXT).expect("text");
        let present = present.iter().cloned().collect();
        let account = divide(&smaps, &present, claims.to_vec());
        for (part, kib) in expected {
            assert_eq!(account.parts.get(part).copied().unwrap_or(0), kib << 10, "{part:?}");
        }
        assert_eq!(account.parts.values().sum::<u64>(), account.rss);
        account
    }

    #[test]
    fn without_claims_mappings_have_kinds() {
        let account = check(
            &[],
            &[],
            &[
                (Part::FilesPrivate, 28),
                (Part::FilesShared, 12),
                (Part::CHeap, 64),
                (Part::Anonymous, 516),
                (Part::Kernel, 4),
                (Part::Stacks, 40),
                (Part::Unknown, 12),
            ],
        );
        assert_eq!((account.swap, account.hugetlb), (12 << 10, 2 << 20));
        let file = FileUse {
            name: b"/bin/x".to_vec(),
            private: 28 << 10,
            shared: 12 << 10,
        };
        assert_eq!(account.files, [file], "with its uninitialized data");
        let names: Vec<_> = account.anonymous.iter().map(|a| (&a.name[..], a.rss >> 10)).collect();
        assert_eq!(names, [(&b""[..], 512), (&b"[anon:mine]"[..], 4)]);
    }

    #[test]
    fn claims_are_taken_out() {
        let present = [0x30000..0x40000, 0x100000..0x180000];
        let heap = Claim {
            range: 0x30000..0x40000,
            amounts: vec![(Part::CInUse, 0), (Part::CFree, 16 << 10)],
        };
        let arenas = Claim::whole(0x140000..0x200000, Part::PythonArenas);
        let overlapping = Claim::whole(0x150000..0x160000, Part::Stacks);
        check(
            &present,
            &[overlapping, arenas, heap],
            &[
                (Part::CInUse, 48),
                (Part::CFree, 16),
                (Part::CHeap, 0),
                (Part::PythonArenas, 256),
                (Part::Anonymous, 260),
                (Part::Stacks, 40),
            ],
        );
    }

    #[test]
    fn arenas_are_split_in_proportion() {
        let account = |bytes| Account {
            parts: Amounts::from([(Part::PythonArenas, bytes)]),
            ..Account::default()
        };
        for (bytes, parts, expected) in [
            (100, [60, 30, 10], [60, 30, 10]),
            (10, [60, 30, 10], [6, 3, 1]),
            (11, [1, 1, 1], [5, 3, 3]),
            (7, [u64::MAX, u64::MAX, 0], [7, 0, 0]),
        ] {
            let mut account = account(bytes);
            let names = [Part::PythonObjects, Part::PythonFreeBlocks, Part::PythonFreePools];
            account.split_arenas([0, 1, 2].map(|i| (names[i], parts[i])));
            let got = names.map(|name| account.parts.get(&name).copied().unwrap_or(0));
            assert_eq!(got, expected, "{bytes} {parts:?}");
        }
        let mut account = account(9);
        account.split_arenas([
            (Part::PythonObjects, 0),
            (Part::PythonFreeBlocks, 0),
            (Part::PythonFreePools, 0),
        ]);
        assert_eq!(account.parts, Amounts::from([(Part::PythonArenas, 9)]));
    }

    #[test]
    fn claims_never_exceed_what_is_resident() {
        let all = std::slice::from_ref(&(0x1000..0x600000));
        // The mapping had 512 KiB when it was listed, and has 1024 now; forged amounts are not more than that.
        let arenas = Claim {
            range: 0x100000..0x200000,
            amounts: vec![(Part::PythonArenas, 0), (Part::CLarge, 512 << 10)],
        };
        check(
            all,
            &[arenas],
            &[(Part::PythonArenas, 256), (Part::CLarge, 256), (Part::Anonymous, 4)],
        );
        let forged = Claim {
            range: 0x100000..0x200000,
            amounts: vec![(Part::PythonArenas, u64::MAX), (Part::CLarge, u64::MAX)],
        };
        check(all, &[forged], &[(Part::Anonymous, 4)]);
        // Across mappings.
        let wide = Claim::whole(0..u64::MAX, Part::Stacks);
        check(all, &[wide], &[(Part::Stacks, 16 + 16 + 8 + 64 + 512 + 4 + 4 + 40)]);
    }
}
