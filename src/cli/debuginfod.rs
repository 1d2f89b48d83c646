//! Whether debuginfod servers are asked for debug information, and how.

use std::ffi::OsString;
use std::path::PathBuf;

use super::args::Debuginfod;
use crate::error::{Error, Kind, Result};
use crate::process::credentials::User;
use crate::process::sys;
use crate::resolve::Fetch;

/// Who is asked for debug files, going by the option and the environment; `None` if nobody. `is_root`: this was called by
/// root, or with sudo by `user`, whom we are now.
///
/// # Errors
/// `Usage` if the option asks for it and no server is named; `Unsupported` if this program was built without it.
pub fn fetch(option: Debuginfod, is_root: bool, user: Option<&User>) -> Result<Option<Fetch>> {
    // Root's files are often not for strangers: which ones there are goes out only if it is asked for.
    let wanted = match option {
        Debuginfod::On => true,
        Debuginfod::Off => false,
        Debuginfod::Auto => !is_root,
    };
    if !wanted {
        return Ok(None);
    }
    let var = |name: &str| {
        // sudo may leave the environment with root's folders, where the user cannot write.
        let value = match (name, user) {
            ("HOME", Some(user)) => Some(OsString::from(&user.home)),
            ("XDG_CACHE_HOME", Some(_)) => None,
            _ => std::env::var_os(name),
        };
        value.filter(|value| !value.is_empty())
    };
    let servers = var("DEBUGINFOD_URLS").unwrap_or_default();
    match client(&servers.to_string_lossy(), cache(&var)) {
        Err(_) if option == Debuginfod::Auto => Ok(None),
        other => other.map(Some),
    }
}

/// `DEBUGINFOD_CACHE_PATH`, else a folder of our own in the user's cache.
fn cache(var: &dyn Fn(&str) -> Option<OsString>) -> PathBuf {
    if let Some(path) = var("DEBUGINFOD_CACHE_PATH") {
        return path.into();
    }
    let home = || var("HOME").map(|home| PathBuf::from(home).join(".cache"));
    let base = var("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .filter(|path| path.is_absolute());
    base.or_else(home)
        .unwrap_or_else(|| std::env::temp_dir().join(format!("cache-{}", sys::effective_uid())))
        .join("nativeprof/debuginfod")
}

#[cfg(feature = "debuginfod")]
fn client(servers: &str, cache: PathBuf) -> Result<Fetch> {
    use std::sync::{Arc, OnceLock};
    let limits = symbolize::Limits::default();
    let client = symbolize::Debuginfod::new(servers, cache, limits).ok_or_else(|| {
        Error::new(Kind::Usage, "no debuginfod server is named")
            .why("DEBUGINFOD_URLS holds no http or https address (sudo does not hand it on)")
            .hint("sudo DEBUGINFOD_URLS=https://debuginfod.debian.net nativeprof attach --debuginfod PID")
    })?;
    let begun: OnceLock<u32> = OnceLock::new();
    Ok(Arc::new(move |build_id: &[u8]| {
        let before = *begun.get_or_init(|| {
            eprintln!("nativeprof: looking for debug information by debuginfod (Ctrl-C goes on without)");
            sys::interrupts()
        });
        client.debug_info(build_id, &|| sys::interrupts() > before)
    }))
}

#[cfg(not(feature = "debuginfod"))]
fn client(_: &str, _: PathBuf) -> Result<Fetch> {
    Err(Error::new(Kind::Unsupported, "debuginfod servers cannot be asked")
        .why("this nativeprof was built without the feature `debuginfod`")
        .hint("cargo build --release --features debuginfod"))
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
