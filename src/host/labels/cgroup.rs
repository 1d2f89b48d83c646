//! What the path of a control group says about the container, pod and unit of its processes.
//!
//! Names of directories: `docker-ID.scope` and `docker/ID` (Docker), `cri-containerd-ID.scope` (containerd), `crio-ID.scope`
//! (CRI-O), `libpod-ID.scope` (Podman), `kubepods-CLASS-podUID.slice` and `kubepods/CLASS/podUID` (kubelet).

/// Bytes of a path that are examined.
const MAX_PATH: usize = 4096;

/// What is known from the path of a control group; names are as the path has them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// 64 hexadecimal digits.
    pub container: Option<String>,
    /// UID of the pod, with hyphens.
    pub pod: Option<String>,
    /// The innermost systemd service, without `.service`.
    pub service: Option<String>,
}

/// The place that the text of `/proc/PID/cgroup` describes. Of several hierarchies, the first that knows each part counts.
pub fn parse(text: &str) -> Place {
    let mut place = Place::default();
    for line in text.lines().take(64) {
        // Hierarchy, controllers, path; the path may have colons.
        let Some(path) = line.splitn(3, ':').nth(2) else {
            continue;
        };
        let found = of_path(path);
        place.container = place.container.or(found.container);
        place.pod = place.pod.or(found.pod);
        place.service = place.service.or(found.service);
    }
    place
}

/// The place that one path describes. The innermost container counts: containers may be nested.
pub fn of_path(path: &str) -> Place {
    let mut place = Place::default();
    if path.len() > MAX_PATH {
        return place;
    }
    for part in path.split('/') {
        if let Some(id) = container_id(part) {
            place.container = Some(id.into());
            // Units below are those of the container's own systemd, those above start the engine.
            place.service = None;
        } else if let Some(uid) = pod_uid(part) {
            place.pod = Some(uid);
            place.container = None;
        } else if let Some(name) = part.strip_suffix(".service").filter(|name| !name.is_empty()) {
            place.service = Some(name.into());
        }
    }
    place
}

/// The container of a directory's name: `ID`, `ENGINE-ID.scope`, or `SLICE:ENGINE:ID` (what systemd is asked for, taken
/// as a path).
fn container_id(part: &str) -> Option<&str> {
    let name = part.strip_suffix(".scope").unwrap_or(part);
    let id = name.rsplit(['-', ':']).next()?;
    // `crio-conmon-ID.scope` is the process that watches the container.
    let engine = name.get(..name.len() - id.len())?;
    (is_id(id) && !engine.contains("conmon")).then_some(id)
}

fn is_id(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

/// The pod of a directory's name: `podUID`, or `kubepods-CLASS-podUID.slice` with underscores. A static pod has 32 digits
/// without hyphens.
fn pod_uid(part: &str) -> Option<String> {
    let name = match part.strip_suffix(".slice") {
        Some(name) => name.strip_prefix("kubepods-")?.rsplit('-').next()?,
        None => part,
    };
    let uid = name.strip_prefix("pod")?.replace('_', "-");
    let digits = uid.bytes().filter(|b| *b != b'-').count();
    let is_uid = digits == 32 && (uid.len() == 32 || uid.len() == 36);
    (is_uid && uid.bytes().all(|b| b == b'-' || b.is_ascii_hexdigit())).then_some(uid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_engines() {
        const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
        const UID: &str = "12345678-1234-1234-1234-123456789abc";
        let check = |text: &str, container: bool, pod: Option<&str>, service: Option<&str>| {
            let text = text
                .replace("ID", ID)
                .replace("UNDER", &UID.replace('-', "_"))
                .replace("POD", UID);
            let expected = Place {
                container: container.then(|| ID.into()),
                pod: pod.map(Into::into),
                service: service.map(Into::into),
            };
            assert_eq!(parse(&text), expected, "{text}");
        };
        // Docker, both drivers, both versions.
        check("0::/system.slice/docker-ID.scope\n", true, None, None);
        check("0::/docker/ID\n", true, None, None);
        check(
            "4:memory:/docker/ID\n1:name=systemd:/docker/ID\n0::/\n",
            true,
            None,
            None,
        );
        // Podman, with and without a user's session.
        check("0::/machine.slice/libpod-ID.scope/container\n", true, None, None);
        let user = "0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-ID.scope\n";
        check(user, true, None, None);
        check("0::/machine.slice/libpod-conmon-ID.scope\n", false, None, None);
        // Kubelet with both drivers.
        let slice = "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podUNDER.slice";
        check(&format!("0::/{slice}/cri-containerd-ID.scope\n"), true, Some(UID), None);
        check(&format!("0::/{slice}/crio-ID.scope\n"), true, Some(UID), None);
        check(&format!("0::/{slice}/crio-conmon-ID.scope\n"), false, Some(UID), None);
        check(
            "0::/kubepods.slice/kubepods-podUNDER.slice/docker-ID.scope\n",
            true,
            Some(UID),
            None,
        );
        check("3:cpu:/kubepods/besteffort/podPOD/ID\n0::/\n", true, Some(UID), None);
        let below = "0::/system.slice/containerd.service/kubepods-podUNDER.slice:cri-containerd:ID\n";
        check(below, true, None, None);
        let fixed = "0123456789abcdef0123456789abcdef";
        check(&format!("0::/kubepods/pod{fixed}/ID\n"), true, Some(fixed), None);
        // A cluster in a container: the inner container is that of the process.
        let outer = "f".repeat(64);
        let nested = format!("0::/docker/{outer}/kubelet.slice/kubelet-kubepods.slice/podPOD/ID\n");
        check(&nested, true, Some(UID), None);
        // Units.
        check("0::/system.slice/nginx.service\n", false, None, Some("nginx"));
        check(
            "0::/system.slice/system-getty.slice/getty@tty1.service\n",
            false,
            None,
            Some("getty@tty1"),
        );
        check("0::/user.slice/user-0.slice/session-1.scope\n", false, None, None);
        for wrong in [
            "",
            "0::",
            "x",
            "0::/\n",
            "0::/.service\n",
            "0::/podx/é\n",
            "0::/docker/ID0\n",
        ] {
            check(wrong, false, None, None);
        }
        let long = format!("0::/{}/docker/ID\n", "x".repeat(MAX_PATH));
        check(&long, false, None, None);
    }
}
