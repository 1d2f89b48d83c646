use super::*;
use std::os::unix::fs::symlink;
use std::time::{Duration, UNIX_EPOCH};

/// A directory of its own, removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        let path = std::env::temp_dir().join(format!("nativeprof-history-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        Scratch(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const MINUTE: Duration = Duration::from_secs(60);

fn write(writer: &mut Writer, minute: u32, message: &[u8]) -> Dropped {
    let start = UNIX_EPOCH + Duration::from_secs(1_795_835_640) + minute * MINUTE;
    writer.write(start, MINUTE, message).unwrap().1
}

fn sequences(path: &Path) -> Vec<u64> {
    let directory = Directory::open(path).unwrap();
    directory
        .segments()
        .iter()
        .map(|segment| segment.name.sequence)
        .collect()
}

#[test]
fn segments_are_read_again_in_their_order() {
    let scratch = Scratch::new("order");
    let path = &scratch.0.join("below");
    let mut writer = Writer::open(path, Limits::default()).unwrap();
    // The clock is stepped back.
    for minute in [100, 40, 41] {
        assert_eq!(write(&mut writer, minute, &minute.to_le_bytes()), Dropped::default());
    }
    drop(writer);
    let mut writer = Writer::open(path, Limits::default()).unwrap();
    assert_eq!((writer.next_sequence(), writer.size().0), (4, 3));
    write(&mut writer, 42, &[42, 0, 0, 0]);
    let directory = Directory::open(path).unwrap();
    let contents = directory
        .segments()
        .iter()
        .map(|segment| directory.read(&segment.name).unwrap());
    let minutes: Vec<u8> = contents.map(|content| content[0]).collect();
    assert_eq!(minutes, [100, 40, 41, 42]);
    assert_eq!(directory.foreign(), (&[][..], 0));
}

#[test]
fn a_second_writer_is_refused() {
    let scratch = Scratch::new("second");
    let writer = Writer::open(&scratch.0, Limits::default()).unwrap();
    let refused = Writer::open(&scratch.0, Limits::default()).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Usage);
    drop(writer);
    Writer::open(&scratch.0, Limits::default()).unwrap();
}

#[test]
fn what_was_left_is_removed_and_what_is_foreign_is_kept() {
    let scratch = Scratch::new("left");
    let path = &scratch.0;
    write(&mut Writer::open(path, Limits::default()).unwrap(), 0, b"a");
    let name = Directory::open(path).unwrap().segments()[0].name;
    let next = SegmentName { sequence: 9, ..name };
    fs::write(temporary(path, &next), "half").unwrap();
    fs::write(path.join(UNFINISHED_METRICS), "half").unwrap();
    fs::write(path.join("notes.txt"), "").unwrap();
    fs::write(path.join("push-0123.cursor"), "1").unwrap();
    symlink("/dev/zero", path.join(SegmentName { sequence: 8, ..name }.to_string())).unwrap();
    let directory = Directory::open(path).unwrap();
    assert_eq!(directory.foreign(), (&["notes.txt".into()][..], 1));
    assert_eq!(sequences(path), [1]);
    let writer = Writer::open(path, Limits::default()).unwrap();
    assert_eq!(writer.next_sequence(), 2);
    assert!(!temporary(path, &next).exists() && !path.join(UNFINISHED_METRICS).exists());
    assert!(path.join("notes.txt").exists());
}

#[test]
fn the_oldest_are_dropped() {
    let scratch = Scratch::new("oldest");
    let path = &scratch.0;
    let limits = Limits {
        keep: Some(2 * MINUTE),
        max_size: None,
    };
    let mut writer = Writer::open(path, limits).unwrap();
    for minute in 0..3 {
        assert_eq!(write(&mut writer, minute, b"a"), Dropped::default());
    }
    let dropped = write(&mut writer, 3, b"a");
    assert_eq!((dropped.segments, dropped.last), (1, Some(1)));
    assert_eq!(sequences(path), [2, 3, 4]);
    drop(writer);
    let limits = Limits {
        keep: None,
        max_size: Some(1),
    };
    let mut writer = Writer::open(path, limits).unwrap();
    let (_, before) = writer.size();
    assert_eq!(write(&mut writer, 4, b"a").bytes, before);
    assert_eq!(sequences(path), [5], "the last one is never dropped");
}

#[test]
fn one_that_cannot_be_removed_does_not_keep_the_others() {
    let scratch = Scratch::new("stuck");
    let path = &scratch.0;
    let limits = Limits {
        keep: Some(MINUTE),
        max_size: None,
    };
    let mut writer = Writer::open(path, limits).unwrap();
    write(&mut writer, 0, b"a");
    // A directory has taken the place of the first one.
    let first = Directory::open(path).unwrap().segments()[0].name;
    let place = path.join(first.to_string());
    fs::remove_file(&place).unwrap();
    fs::create_dir(&place).unwrap();
    write(&mut writer, 1, b"a");
    let dropped = write(&mut writer, 3, b"a");
    let failure = dropped.failure.unwrap();
    assert!(failure.starts_with(&first.to_string()), "{failure}");
    assert_eq!((dropped.segments, dropped.last), (1, Some(2)));
    assert_eq!(sequences(path), [3]);
    fs::remove_dir(&place).unwrap();
    assert_eq!(write(&mut writer, 3, b"a").last, Some(1), "it is tried again");
}

#[test]
fn numbers_are_not_used_again() {
    let scratch = Scratch::new("again");
    let path = &scratch.0;
    let mut writer = Writer::open(path, Limits::default()).unwrap();
    writer.begin_at(9);
    write(&mut writer, 0, b"a");
    writer.begin_at(3);
    writer.begin_at(u64::MAX);
    write(&mut writer, 1, b"a");
    assert_eq!(sequences(path), [9, 10]);
}

/// What is old is known by the newest segment's clock: a clock that was stepped back drops nothing early, one that was stepped
/// forward what is older by it.
#[test]
fn clocks_are_stepped() {
    for (minutes, kept) in [
        (&[100, 101, 102, 42, 43, 44][..], &[1, 2, 3, 4, 5, 6][..]),
        (&[100, 101, 102, 42, 43, 104, 105], &[2, 3, 4, 5, 6, 7]),
        (&[40, 41, 42, 102, 103], &[4, 5]),
    ] {
        let scratch = Scratch::new("stepped");
        let path = &scratch.0;
        let limits = Limits {
            keep: Some(4 * MINUTE),
            max_size: None,
        };
        let mut writer = Writer::open(path, limits).unwrap();
        for minute in minutes {
            write(&mut writer, *minute, b"a");
        }
        assert_eq!(sequences(path), kept, "{minutes:?}");
    }
}

#[test]
fn what_cannot_be_written_leaves_the_others() {
    let scratch = Scratch::new("failure");
    let path = &scratch.0;
    let mut writer = Writer::open(path, Limits::default()).unwrap();
    write(&mut writer, 0, b"a");
    // A directory has the name of the next temporary file.
    let name = SegmentName {
        sequence: 2,
        ..Directory::open(path).unwrap().segments()[0].name
    };
    fs::create_dir(temporary(path, &name)).unwrap();
    let start = UNIX_EPOCH + Duration::from_millis(name.start);
    assert!(writer.write(start, MINUTE, b"b").is_err());
    assert_eq!((sequences(path), writer.next_sequence()), (vec![1], 2));
    fs::remove_dir(temporary(path, &name)).unwrap();
    writer.write(start, MINUTE, b"b").unwrap();
    assert_eq!(sequences(path), [1, 2]);
}

#[test]
fn damaged_segments_are_errors() {
    let scratch = Scratch::new("damaged");
    let path = &scratch.0;
    write(&mut Writer::open(path, Limits::default()).unwrap(), 0, &[7; 100_000]);
    let directory = Directory::open(path).unwrap();
    let name = directory.segments()[0].name;
    let bytes = fs::read(directory.path_of(&name)).unwrap();
    for part in [&b"no gzip"[..], &bytes[..bytes.len() / 2]] {
        fs::write(directory.path_of(&name), part).unwrap();
        assert!(directory.read(&name).is_err());
    }
    fs::remove_file(directory.path_of(&name)).unwrap();
    assert_eq!(directory.read(&name).unwrap_err().kind(), io::ErrorKind::NotFound);
}
