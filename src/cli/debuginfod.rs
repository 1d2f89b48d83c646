//! Whether debug information is downloaded from debuginfod servers, and how.

use std::ffi::OsString;
use std::path::PathBuf;

use super::args::DebuginfodArg;
use crate::error::{Error, ErrorKind, Result};
use crate::privileges::credentials::User;
use crate::resolve::Fetch;
use crate::sys;

/// The debuginfod client for the option and the environment; `None` without downloads. `is_root`: nativeprof was
/// started by root, or with sudo by `user`, to which it has switched.
///
/// # Errors
/// `Usage` if the option is `on` and no server is configured; `Unsupported` if the feature is not in this build.
pub fn fetch(option: DebuginfodArg, is_root: bool, user: Option<&User>) -> Result<Option<Fetch>> {
    // Requests reveal which builds run here, which root may not want: only on request.
    let wanted = match option {
        DebuginfodArg::On => true,
        DebuginfodArg::Off => false,
        DebuginfodArg::Auto => !is_root,
    };
    if !wanted {
        return Ok(None);
    }
    let var = |name: &str| {
        // sudo may leave root's directories in the environment, where the user cannot write.
        let value = match (name, user) {
            ("HOME", Some(user)) => Some(OsString::from(&user.home)),
            ("XDG_CACHE_HOME", Some(_)) => None,
            _ => std::env::var_os(name),
        };
        value.filter(|value| !value.is_empty())
    };
    let servers = var("DEBUGINFOD_URLS").unwrap_or_default();
    match client(&servers.to_string_lossy(), cache(&var)) {
        Err(_) if option == DebuginfodArg::Auto => Ok(None),
        other => other.map(Some),
    }
}

/// `DEBUGINFOD_CACHE_PATH`, else a directory in the user's cache.
fn cache(var: &dyn Fn(&str) -> Option<OsString>) -> PathBuf {
    if let Some(path) = var("DEBUGINFOD_CACHE_PATH") {
        return path.into();
    }
    let home = || var("HOME").map(|home| PathBuf::from(home).join(".cache"));
    let base = var("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .filter(|path| path.is_absolute());
    base.or_else(home)
        .unwrap_or_else(|| std::env::temp_dir().join(format!("cache-{}", sys::process::effective_uid())))
        .join("nativeprof/debuginfod")
}

#[cfg(feature = "debuginfod")]
fn client(servers: &str, cache: PathBuf) -> Result<Fetch> {
    use std::sync::{Arc, OnceLock};
    let limits = symbolize::Limits::default();
    let client = symbolize::Debuginfod::new(servers, cache, limits).ok_or_else(|| {
        Error::new(ErrorKind::Usage, "no debuginfod server is configured")
            .why("DEBUGINFOD_URLS has no http or https URL (sudo does not pass it through)")
            .hint("sudo DEBUGINFOD_URLS=https://debuginfod.debian.net nativeprof attach --debuginfod PID")
    })?;
    let begun: OnceLock<u32> = OnceLock::new();
    Ok(Arc::new(move |build_id: &[u8]| {
        let before = *begun.get_or_init(|| {
            crate::cli::print_line("nativeprof: downloading debug info with debuginfod (Ctrl-C to skip)");
            sys::interrupts::interrupts()
        });
        client.debug_info(build_id, &|| sys::interrupts::interrupts() > before)
    }))
}

#[cfg(not(feature = "debuginfod"))]
fn client(_: &str, _: PathBuf) -> Result<Fetch> {
    Err(
        Error::new(ErrorKind::Unsupported, "debuginfod is not supported by this build")
            .why("it was built without the feature `debuginfod`")
            .hint("cargo build --release --features debuginfod"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_is_where_the_environment_says() {
        for (vars, expected) in [
            (&[("DEBUGINFOD_CACHE_PATH", "/d"), ("HOME", "/h")][..], "/d"),
            (&[("XDG_CACHE_HOME", "/x"), ("HOME", "/h")], "/x/nativeprof/debuginfod"),
            (
                &[("XDG_CACHE_HOME", "relative"), ("HOME", "/h")],
                "/h/.cache/nativeprof/debuginfod",
            ),
            (&[("HOME", "/h")], "/h/.cache/nativeprof/debuginfod"),
        ] {
            let var = |name: &str| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| OsString::from(v));
            assert_eq!(cache(&var), PathBuf::from(expected), "{vars:?}");
        }
    }
}
