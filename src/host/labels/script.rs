//! The script that a Python interpreter runs, from its arguments. Nothing else of them is used.

/// Bytes of an argument that are examined.
const MAX_ARGUMENT: usize = 4096;

/// Name of the script of a command line as `/proc/PID/cmdline` has it: the file's, or the module's. `None`: it is not there
/// (`-c`, standard input), or the process has overwritten its arguments.
///
/// Options are those of CPython's documentation, "Command line and environment", 3.15.
pub fn name(command_line: &[u8]) -> Option<String> {
    let mut arguments = command_line.split(|byte| *byte == 0).skip(1);
    loop {
        let argument = arguments.next()?;
        if argument.len() > MAX_ARGUMENT {
            return None;
        }
        match argument {
            b"--" => return of_file(arguments.next()?),
            b"--check-hash-based-pycs" => drop(arguments.next()?),
            [b'-', b'-', ..] => {}
            b"-" | b"" => return None,
            [b'-', letters @ ..] => {
                let Some(at) = letters.iter().position(|letter| b"cmWX".contains(letter)) else {
                    continue;
                };
                let attached = letters.get(at + 1..).filter(|rest| !rest.is_empty());
                let value = attached.or_else(|| arguments.next());
                match letters.get(at)? {
                    b'c' => return None,
                    b'm' => return of_module(value?),
                    _ => {}
                }
            }
            file => return of_file(file),
        }
    }
}

fn of_module(name: &[u8]) -> Option<String> {
    let is_name = |byte: &u8| byte.is_ascii_alphanumeric() || b"._".contains(byte) || !byte.is_ascii();
    (!name.is_empty() && name.iter().all(is_name)).then(|| text(name))
}

/// The last part of a path; the directory's for a `__main__.py` in it.
fn of_file(path: &[u8]) -> Option<String> {
    // A pipe or an open file of a shell has a number only.
    if path.starts_with(b"/dev/") || path.starts_with(b"/proc/") {
        return None;
    }
    let mut parts = path.rsplit(|byte| *byte == b'/').filter(|part| !part.is_empty());
    let last = parts.next()?;
    let around = (last == b"__main__.py").then(|| parts.next()).flatten();
    let name = around.filter(|name| !matches!(*name, b"." | b"..")).unwrap_or(last);
    (!matches!(name, b"." | b"..")).then(|| text(name))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_and_modules() {
        for (line, expected) in [
            ("python3 manage.py runserver --password=secret", Some("manage.py")),
            ("python3 /srv/shop/worker.py", Some("worker.py")),
            ("/usr/bin/python3 /opt/venv/bin/celery -A shop worker", Some("celery")),
            ("python3 -m gunicorn app:app --token secret", Some("gunicorn")),
            ("python3 -mhttp.server 8000", Some("http.server")),
            ("python3 -IBum shop.tasks secret", Some("shop.tasks")),
            ("python3 -X dev -W ignore -OO worker.py -m other", Some("worker.py")),
            ("python3 -Xdev -Wignore worker.py", Some("worker.py")),
            ("python3 -uX dev worker.py", Some("worker.py")),
            ("python3 --check-hash-based-pycs always worker.py", Some("worker.py")),
            ("python3 -- -odd.py", Some("-odd.py")),
            ("python3 /srv/shop/__main__.py", Some("shop")),
            ("python3 __main__.py", Some("__main__.py")),
            ("python3 /srv/shop/ secret", Some("shop")),
            ("python3 app.pyz", Some("app.pyz")),
            ("python3 -c import_os secret", None),
            ("python3 -Ic import_os secret", None),
            ("python3 - secret", None),
            ("python3 .", None),
            ("python3 /dev/fd/63 secret", None),
            ("python3", None),
            ("python3 -m", None),
            ("python3 -m a/b", None),
            ("python3 -W", None),
            ("python3 --", None),
            ("", None),
        ] {
            let line = line.replace(' ', "\0") + "\0";
            assert_eq!(name(line.as_bytes()).as_deref(), expected, "{line:?}");
        }
        // Overwritten by the process (setproctitle): the rest is empty.
        assert_eq!(name(b"shop: worker --password secret\0\0\0\0"), None);
        assert_eq!(name(b"python3\0w\xff.py\0"), Some("w\u{fffd}.py".into()));
        let long = [b"python3\0", &*vec![b'x'; MAX_ARGUMENT + 1]].concat();
        assert_eq!(name(&long), None);
    }
}
