//! `host`: records all processes of a host as a history.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use clap::ValueEnum;

use crate::capture::{HostFilter, SamplingOptions};
use crate::cli::args::{BackendChoice, Host, HostFilterArgs, Sampling};
use crate::cli::backend::{check_rate, open_backend};
use crate::cli::discover;
use crate::error::{Error, ErrorKind, Result};
use crate::event::Pid;
use crate::history::{Limits, Writer};
use crate::host::labels::{LabelOptions, LabelReader};
use crate::host::logs::Log;
use crate::host::recorder::{HostOptions, HostRecorder, Surroundings};
use crate::host::sd_notify::{self, Notifier};
use crate::privileges::checks::host::State;
use crate::privileges::checks::{self, MissingPrivilege, SystemFacts};
use crate::privileges::credentials::{self, Caps, UserQuery};
use crate::privileges::phases;
use crate::push::{self, Endpoint};
use crate::session::{Grouping, Recording, SessionOptions};
use crate::sys;
use crate::sys::cgroup::{self, UNIFIED_MOUNTS, each_below, is_unified, unified_root};

/// Shortest part of a container's id: others would name several.
const MIN_ID: usize = 6;
/// First wait before the process that sends is started again, and the longest.
const FIRST_RESTART: Duration = Duration::from_secs(1);
const LONGEST_RESTART: Duration = Duration::from_secs(60);

/// Records until a signal.
///
/// # Errors
/// `Usage` for cgroups, containers and users that are not there; those of the history and of the backend.
pub fn host(options: &Host) -> Result<()> {
    check_rate(options.rate)?;
    check_receiver(options)?;
    let limited = check_capabilities()?;
    let filter = filter(&options.filter)?;
    let limits = Limits {
        keep: Some(Duration::from_secs_f64(options.keep)),
        max_size: Some(options.max_size),
    };
    phases::restrict_to_setup(Caps::NONE)?;
    // With the privileges that it is written with later.
    let mut writer = Writer::open(&options.dir, limits)?;
    writer.begin_at(push::largest_sequence(&options.dir));
    sys::files::raise_file_limit();
    sys::interrupts::install_interrupt_handler();
    sys::interrupts::renew_at_hangup();
    let sampling = Sampling::of_host(options.kernel);
    let capture = SamplingOptions {
        spans: options.spans,
        host: Some(filter),
        ..sampling.capture(options.rate, true)
    };
    let backend = open_backend(BackendChoice::Ebpf, &capture)?;
    let session = SessionOptions {
        grouping: Grouping::default(),
        measure: sampling.measure(options.rate),
        spans: options.spans,
        thread_context: options.spans,
        host: true,
        ..SessionOptions::default()
    };
    let mut recording = Recording::new(session, backend, options.rate, 0, None);
    recording.name_only_apart();
    let variable = |name: &str| std::env::var_os(name);
    let notifier = Notifier::new(variable("NOTIFY_SOCKET").as_deref())
        .map_err(|e| Error::io("cannot reach the service manager", e).hint("unset NOTIFY_SOCKET"))?;
    let watchdog =
        sd_notify::watchdog_interval(variable("WATCHDOG_USEC"), variable("WATCHDOG_PID"), std::process::id());
    let log = options.log_format.log();
    let mut network = NetworkProcess::of(options);
    recording.start()?;
    phases::restrict_to_sampling(Caps::NONE)?;
    log.event(
        "started",
        &[
            ("dir", &options.dir.display()),
            ("rate_hz", &options.rate),
            ("backend", &recording.backend_name()),
        ],
    );
    for MissingPrivilege { feature, reason, fix } in &limited {
        log.event("limited", &[("needs", feature), ("why", reason), ("try", fix)]);
    }
    let mut keep_network = || network.as_mut().and_then(|network| network.keep_running(&log));
    let recorder = HostRecorder::new(
        recording,
        writer,
        LabelReader::new(LabelOptions {
            include_env: options.include_env.clone(),
            labels: options.label.clone(),
        }),
        HostOptions {
            rate: options.rate,
            segment: Duration::from_secs_f64(options.segment),
            duration: options.duration.map(Duration::from_secs_f64),
            max_cpu: options.max_cpu,
            max_memory: options.max_memory,
        },
        Surroundings {
            log: &log,
            notifier: &notifier,
            watchdog,
            network: &mut keep_network,
        },
    );
    let done = recorder.run();
    log.event("stopped", &[]);
    done
}

/// # Errors
/// `Usage`: the receiver's address is not one, or there are files for a receiver, and no receiver.
fn check_receiver(options: &Host) -> Result<()> {
    options.push.as_deref().map(Endpoint::parse).transpose()?;
    match options.credentials.words().first() {
        Some(option) if options.push.is_none() => Err(Error::new(
            ErrorKind::Usage,
            format!("{} is for a receiver, and none is given", option.display()),
        )
        .why("nothing is sent without --push")
        .hint("nativeprof host --push http://localhost:4318, or without that option")),
        _ => Ok(()),
    }
}

/// Capabilities without which segments have less in them.
///
/// # Errors
/// `NotPermitted`: one is missing without which there are none.
fn check_capabilities() -> Result<Vec<MissingPrivilege>> {
    let mut limited = Vec::new();
    for need in checks::host::capabilities(&SystemFacts::read()) {
        match need.state {
            State::Met(_) => {}
            State::Limited(missing) => limited.push(missing),
            State::Missing(missing) => return Err(missing.error("recording a host is not permitted")),
        }
    }
    Ok(limited)
}

/// Which processes are sampled; never our own.
fn filter(args: &HostFilterArgs) -> Result<HostFilter> {
    let mut cgroups = (args.cgroup.iter())
        .map(|path| cgroup_id(path))
        .collect::<Result<Vec<_>>>()?;
    for id in &args.container {
        cgroups.extend(container(id)?);
    }
    let mut processes = Vec::new();
    for pid in &args.pid {
        discover::check_target(*pid)?;
        processes.push(*pid);
        processes.extend(discover::descendants(*pid));
    }
    Ok(HostFilter {
        cgroups,
        comms: args.comm.iter().map(|name| name.as_bytes().to_vec()).collect(),
        users: args.user.iter().map(|name| user(name)).collect::<Result<_>>()?,
        processes,
        excluded: vec![std::process::id()],
    })
}

/// The number of a cgroup: the inode of its directory.
fn cgroup_id(path: &Path) -> Result<u64> {
    let below = path.strip_prefix("/").unwrap_or(path);
    let places = UNIFIED_MOUNTS.iter().map(|mount| Path::new(mount).join(below));
    let found = std::iter::once(path.to_path_buf())
        .chain(places)
        .find(|place| place.starts_with(cgroup::MOUNT) && place.join("cgroup.procs").exists() && is_unified(place));
    let Some(found) = found else {
        return Err(
            Error::new(ErrorKind::Usage, format!("there is no cgroup {}", path.display()))
                .why(format!(
                    "no directory of that name is below {} (version 2)",
                    UNIFIED_MOUNTS.join(" or ")
                ))
                .hint("--cgroup with the path from /proc/PID/cgroup, in the line that begins with 0::"),
        );
    };
    let metadata = fs::metadata(&found).map_err(|e| Error::io(format!("cannot read {}", found.display()), e))?;
    Ok(metadata.ino())
}

/// The cgroups of a container.
fn container(id: &str) -> Result<Vec<u64>> {
    if id.len() < MIN_ID {
        return Err(
            Error::new(ErrorKind::Usage, format!("`{id}` is too short for a container"))
                .why(format!("at least {MIN_ID} characters of its id are needed"))
                .hint("--container with more of the id"),
        );
    }
    let mut found = Vec::new();
    if let Some(root) = unified_root() {
        each_below(&root, &mut |path, number| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let is_its = names_container(&name, id);
            found.extend(is_its.then_some(number));
            // What is below is sampled with it.
            !is_its
        });
    }
    if found.is_empty() {
        return Err(Error::new(ErrorKind::Usage, format!("there is no container {id}"))
            .why("no cgroup (version 2) is named by this id; the container may have ended")
            .hint("list ids with `docker ps --no-trunc`, `crictl ps` or `podman ps`"));
    }
    Ok(found)
}

/// Whether the name of a cgroup has an id that begins so: `ID`, `docker-ID.scope`, `cri-containerd-ID.scope`.
fn names_container(name: &str, id: &str) -> bool {
    let name = name.strip_suffix(".scope").unwrap_or(name);
    name.starts_with(id) || name.rsplit_once('-').is_some_and(|(_, last)| last.starts_with(id))
}

fn user(name: &str) -> Result<u32> {
    let number = name.parse().ok();
    let known = || credentials::find_user(UserQuery::Name(name)).map(|user| user.uid);
    number.or_else(known).ok_or_else(|| {
        Error::new(ErrorKind::Usage, format!("there is no user {name}"))
            .why("the system does not know this name, and it is not a number")
            .hint("--user with a name or a number: `id NAME` prints it")
    })
}

/// The process that sends segments, and serves metrics.
struct NetworkProcess {
    /// Those of `push`.
    arguments: Vec<OsString>,
    running: Option<Child>,
    /// How often settings were to be read again when this was passed on.
    hangups: u32,
    /// When it may be started again, and the wait after that.
    next: Instant,
    wait: Duration,
}

impl NetworkProcess {
    /// One that does what the options ask for; `None`: nothing.
    fn of(options: &Host) -> Option<NetworkProcess> {
        let mut arguments: Vec<OsString> = vec!["push".into(), options.dir.clone().into(), "--with-parent".into()];
        if let Some(url) = &options.push {
            arguments.extend(["--to".into(), url.into()]);
            arguments.extend(options.credentials.words());
        }
        if let Some(address) = &options.metrics {
            arguments.extend(["--metrics".into(), address.into()]);
        }
        match (&options.push, &options.metrics) {
            (None, None) => return None,
            (None, Some(_)) => arguments.push("--metrics-only".into()),
            (Some(_), _) => {}
        }
        if let Some(format) = options.log_format.to_possible_value() {
            arguments.extend(["--log-format".into(), format.get_name().into()]);
        }
        Some(NetworkProcess {
            arguments,
            running: None,
            hangups: sys::interrupts::hangups(),
            next: Instant::now(),
            wait: FIRST_RESTART,
        })
    }

    /// Starts the process if it does not run, and passes SIGHUP on to it. Returns its id.
    fn keep_running(&mut self, log: &Log) -> Option<Pid> {
        let hangups = sys::interrupts::hangups();
        let is_asked = std::mem::replace(&mut self.hangups, hangups) != hangups;
        if let Some(child) = &mut self.running {
            match child.try_wait() {
                Ok(None) => {
                    if is_asked {
                        sys::interrupts::hang_up(child);
                    }
                    return Some(child.id());
                }
                Ok(Some(status)) => {
                    let wait = self.wait.as_secs();
                    log.error("push_ended", &status.to_string(), &[("restart_in_s", &wait)]);
                }
                Err(e) => log.error("push_ended", &e.to_string(), &[]),
            }
            self.running = None;
            self.next = Instant::now() + self.wait;
            self.wait = (self.wait * 2).min(LONGEST_RESTART);
        }
        if Instant::now() < self.next {
            return None;
        }
        let mut command = Command::new("/proc/self/exe");
        command.args(&self.arguments);
        match command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn() {
            Ok(child) => self.running = Some(child),
            Err(e) => {
                log.error("push_not_started", &e.to_string(), &[]);
                self.next = Instant::now() + self.wait;
                self.wait = (self.wait * 2).min(LONGEST_RESTART);
            }
        }
        self.running.as_ref().map(Child::id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containers_are_named_by_the_beginning_of_their_ids() {
        for (name, id, expected) in [
            ("docker-0123456789ab.scope", "012345", true),
            ("cri-containerd-0123456789ab.scope", "0123456789ab", true),
            ("0123456789ab", "0123456789", true),
            ("docker-0123456789ab.scope", "456789", false),
            ("system.slice", "012345", false),
        ] {
            assert_eq!(names_container(name, id), expected, "{name} {id}");
        }
    }

    #[test]
    fn what_is_not_there_is_refused() {
        assert!(cgroup_id(Path::new("no/such/group")).is_err());
        assert!(cgroup_id(Path::new("/etc")).is_err());
        assert!(container("abc").is_err() && container("ffffffffffffffff0000").is_err());
        assert!(user("no such user").is_err());
        assert_eq!(user("0").ok(), Some(0));
    }
}
