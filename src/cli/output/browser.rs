//! Opens a written file in the browser of the user's desktop.

use std::io::IsTerminal;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::cli::args::Browse;
use crate::privileges::credentials::{self, UserQuery};
use crate::sys;

/// Overrides the default of `--browser`.
const VARIABLE: &str = "NATIVEPROF_BROWSER";
/// The program that opens a file as the desktop is configured (freedesktop.org).
const OPENER: &str = "xdg-open";
/// What to say where there is no file to open.
pub const NOT_STANDARD_OUTPUT: &str = "standard output is not opened in a browser: use -o FILE";
/// How long it has to fail, so that the reason can be said.
const TIME_TO_FAIL: Duration = Duration::from_millis(500);

/// Opens a file if that was requested; `Auto`: if `by_default`, and nativeprof runs on a terminal of a desktop. Returns what
/// to say about it.
pub fn open(when: Browse, path: &Path, by_default: bool) -> Option<String> {
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let when = match (when, variable(VARIABLE).as_deref()) {
        (Browse::Auto, Some("off" | "0" | "no")) => Browse::Off,
        (when, _) => when,
    };
    let has_desktop = variable("DISPLAY").or_else(|| variable("WAYLAND_DISPLAY")).is_some();
    let is_root = sys::process::effective_uid() == 0;
    match when {
        Browse::Off => return None,
        Browse::Auto => {
            let is_remote = variable("SSH_CONNECTION").is_some();
            let is_desktop = has_desktop && !is_remote && std::io::stderr().is_terminal();
            if !by_default || !is_desktop || is_root {
                return None;
            }
        }
        Browse::On => {}
    }
    let refused = |why: &str| Some(format!("{} is not opened: {why}", path.display()));
    if !has_desktop {
        return refused("there is no desktop here (neither DISPLAY nor WAYLAND_DISPLAY is set)");
    }
    if is_root {
        return refused("a browser should not run as root; open it as another user");
    }
    match start(path) {
        Err(why) => refused(&why),
        Ok(()) if when == Browse::Auto => Some(format!(
            "opened in the browser (to prevent that: --browser=off, or {VARIABLE}=off in the environment)"
        )),
        Ok(()) => Some("opened in the browser".into()),
    }
}

/// Starts the browser, as the user that this process has become under sudo.
fn start(path: &Path) -> Result<(), String> {
    let path: PathBuf = path.canonicalize().map_err(|e| e.to_string())?;
    let mut command = Command::new(OPENER);
    command.arg(path).process_group(0);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let uid = sys::process::effective_uid();
    if let Some(user) = credentials::find_user(UserQuery::Uid(uid)) {
        // Under sudo these are root's, or not set.
        let runtime = format!("/run/user/{uid}");
        command
            .env("HOME", &user.home)
            .env("USER", &user.name)
            .env("LOGNAME", &user.name);
        if Path::new(&runtime).is_dir() {
            command.env("DBUS_SESSION_BUS_ADDRESS", format!("unix:path={runtime}/bus"));
            command.env("XDG_RUNTIME_DIR", runtime);
        }
    }
    let mut child = command.spawn().map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => format!("{OPENER} is not installed (package xdg-utils)"),
        _ => format!("{OPENER} does not start: {e}"),
    })?;
    let start = Instant::now();
    while start.elapsed() < TIME_TO_FAIL {
        match child.try_wait() {
            Ok(Some(status)) if !status.success() => return Err(format!("{OPENER} failed with {status}")),
            Ok(Some(_)) | Err(_) => break,
            // It may become the browser itself.
            Ok(None) => std::thread::sleep(Duration::from_millis(10)),
        }
    }
    Ok(())
}
