//! What the path of a control group says about the container, pod and unit of its processes.

/// Bytes of a path that are examined.
const MAX_PATH: usize = 4096;
/// Hierarchies of a process that are examined.
const MAX_LINES: usize = 64;

/// What is known from the path of a control group; names are as the path has them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// 64 hexadecimal digits; the name of a container of LXC; of one of AWS Fargate the task and a number.
    pub container: Option<String>,
    /// UID of the pod, with hyphens.
    pub pod: Option<String>,
    /// The innermost systemd service, without `.service`.
    pub service: Option<String>,
}

/// The place that the text of `/proc/PID/cgroup` describes. Of several hierarchies, the first that knows each part counts.
pub fn parse(text: &str) -> Place {
    let mut place = Place::default();
    for line in text.lines().take(MAX_LINES) {
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
    let mut around = "";
    let mut session = None;
    for part in path.split('/') {
        if let Some(id) = container_id(part, around) {
            place.container = Some(id.into());
            // Units below are those of the container's own systemd, those above start the engine, but for a unit that runs this
            // one container (`podman run --cgroups=split`).
            if !part.starts_with("libpod-payload-") {
                place.service = None;
            }
            session = None;
        } else if let Some(uid) = pod_uid(part) {
            place.pod = Some(uid);
            place.container = None;
        } else if let Some(name) = service(part) {
            // What a user's own systemd starts is below it, in services and others.
            let is_manager = name.starts_with("user@");
            session = is_manager.then(|| name.to_string());
            place.service = (!is_manager).then(|| name.to_string());
        } else if part == "init.scope" {
            place.service = session.take().or(place.service);
        }
        around = part;
    }
    place
}

/// The container of a directory's name: `ID`, `ENGINE-ID.scope`, or `SLICE:ENGINE:ID` (what systemd is asked for, taken
/// as a path); and those that are known by their place or their names.
fn container_id<'a>(part: &'a str, around: &str) -> Option<&'a str> {
    if let Some(name) = part.strip_prefix("lxc.payload.") {
        return (!name.is_empty()).then_some(name);
    }
    if matches!(around, "lxc" | "lxc.payload") && !part.is_empty() {
        return Some(part);
    }
    if is_of_fargate(part, around) {
        return Some(part);
    }
    let name = part.strip_suffix(".scope").unwrap_or(part);
    let id = name.rsplit(['-', ':']).next()?;
    // `crio-conmon-ID.scope` is the process that watches the container.
    let engine = name.get(..name.len() - id.len())?;
    (is_id(id) && !engine.contains("conmon")).then_some(id)
}

fn is_id(text: &str) -> bool {
    text.len() == 64 && is_hex(text)
}

fn is_hex(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

/// `ecs/TASK/TASK-NUMBER`
fn is_of_fargate(part: &str, task: &str) -> bool {
    let number = part.strip_prefix(task).and_then(|rest| rest.strip_prefix('-'));
    let is_number = |text: &str| (1..=10).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit());
    task.len() == 32 && is_hex(task) && number.is_some_and(is_number)
}

/// The pod of a directory's name: `podUID`, or `kubepods-CLASS-podUID.slice` with underscores, below another root
/// `ROOT-kubepods-...`. A static pod has 32 digits without hyphens.
fn pod_uid(part: &str) -> Option<String> {
    let name = match part.strip_suffix(".slice") {
        Some(name) => {
            let (around, last) = name.rsplit_once('-')?;
            around.split('-').any(|word| word == "kubepods").then_some(last)?
        }
        None => part,
    };
    let uid = name.strip_prefix("pod")?.replace('_', "-");
    let digits = uid.bytes().filter(|b| *b != b'-').count();
    let is_uid = digits == 32 && (uid.len() == 32 || uid.len() == 36);
    (is_uid && uid.bytes().all(|b| b == b'-' || b.is_ascii_hexdigit())).then_some(uid)
}

/// The unit of a directory's name, as `systemctl` prints it. systemd puts a `_` before a name that the kernel could take for one
/// of its files, or that begins with one.
fn service(part: &str) -> Option<&str> {
    let name = part.strip_prefix('_').unwrap_or(part);
    name.strip_suffix(".service").filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
    const UID: &str = "12345678-1234-1234-1234-123456789abc";
    const STATIC: &str = "0123456789abcdef0123456789abcdef";
    const OUTER: &str = "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff";

    /// `ID`, `OUTER`, `POD`, `UNDER` and `STATIC` stand for identifiers, in the text and in what is expected: `container pod
    /// service`, `-` for none.
    fn check(text: &str, expected: &str) {
        let full = |text: &str| {
            text.replace("STATIC", STATIC)
                .replace("OUTER", OUTER)
                .replace("ID", ID)
                .replace("UNDER", &UID.replace('-', "_"))
                .replace("POD", UID)
        };
        let place = parse(&full(text));
        let found = [&place.container, &place.pod, &place.service];
        let found = found.map(|part| part.as_deref().unwrap_or("-")).join(" ");
        assert_eq!(found, full(expected), "{text}");
    }

    /// Docker: `scopePrefix` and `defaultCgroupParent` in daemon/oci_linux.go, moby 27.
    #[test]
    fn docker() {
        check("0::/system.slice/docker-ID.scope\n", "ID - -");
        check("0::/docker/ID\n", "ID - -");
        check("4:memory:/docker/ID\n1:name=systemd:/docker/ID\n0::/\n", "ID - -");
        check("0::/system.slice/docker.service\n", "- - docker");
        // Without root.
        check(
            "0::/user.slice/user-1000.slice/user@1000.service/user.slice/docker-ID.scope\n",
            "ID - -",
        );
        // A container's own systemd, and a container in it.
        check(
            "0::/system.slice/docker-OUTER.scope/system.slice/nginx.service\n",
            "OUTER - nginx",
        );
        check("0::/system.slice/docker-OUTER.scope/docker/ID\n", "ID - -");
    }

    /// Podman: `getOCICgroupPath` in libpod/container_internal_linux.go, Podman 6.1.
    #[test]
    fn podman() {
        check("0::/machine.slice/libpod-ID.scope\n", "ID - -");
        check("0::/machine.slice/libpod-ID.scope/container\n", "ID - -");
        check("0::/libpod_parent/libpod-ID\n", "ID - -");
        check("0::/machine.slice/libpod-conmon-ID.scope\n", "- - -");
        check(
            "0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-ID.scope\n",
            "ID - -",
        );
        // A unit for a container: its name is that of the service.
        check("0::/system.slice/web.service/libpod-payload-ID\n", "ID - web");
        check("0::/system.slice/web.service/runtime\n", "- - web");
        let of_user = "0::/user.slice/user-1000.slice/user@1000.service/app.slice/web.service/libpod-payload-ID\n";
        check(of_user, "ID - web");
    }

    /// Kubelet: `podCgroupNamePrefix` in pkg/kubelet/cm/pod_container_manager_linux.go, `ToSystemd` and `ToCgroupfs` in
    /// cgroup_manager_linux.go, Kubernetes 1.31. Below it containerd (`getCgroupsPath`,
    /// internal/cri/server/podsandbox/helpers_linux.go, containerd 2.0) and CRI-O (`ContainerCgroupAbsolutePath`,
    /// internal/config/cgmgr/systemd_linux.go, CRI-O 1.31).
    #[test]
    fn kubernetes() {
        let slice = "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podUNDER.slice";
        check(&format!("{slice}/cri-containerd-ID.scope\n"), "ID POD -");
        check(&format!("{slice}/crio-ID.scope\n"), "ID POD -");
        check(&format!("{slice}/crio-ID.scope/container\n"), "ID POD -");
        check(&format!("{slice}/crio-conmon-ID.scope\n"), "- POD -");
        check(&format!("{slice}\n"), "- POD -");
        check(
            "0::/kubepods.slice/kubepods-podUNDER.slice/docker-ID.scope\n",
            "ID POD -",
        );
        check("3:cpu:/kubepods/besteffort/podPOD/ID\n0::/\n", "ID POD -");
        check("0::/kubepods/burstable/podPOD/crio-ID\n", "ID POD -");
        check("0::/kubepods/podSTATIC/ID\n", "ID STATIC -");
        // systemd's form where it is taken for a path.
        check(
            "0::/system.slice/containerd.service/kubepods-podUNDER.slice:cri-containerd:ID\n",
            "ID - -",
        );
        // As seen from another container's namespace of cgroups.
        check(
            "0::/../../kubepods-besteffort-podUNDER.slice/cri-containerd-ID.scope\n",
            "ID POD -",
        );
        // Not the kubelet's.
        check("0::/podman.slice/podman-podUNDER.slice\n", "- - -");
    }

    /// kind: `--cgroup-root=/kubelet` in images/base/files/kind/bin and pkg/cluster/internal/kubeadm/config.go, kind 0.24.
    #[test]
    fn clusters_in_containers() {
        let slices = "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice";
        let pod = "kubelet-kubepods-besteffort-podUNDER.slice";
        check(
            &format!("0::/system.slice/docker-OUTER.scope/{slices}/{pod}/cri-containerd-ID.scope\n"),
            "ID POD -",
        );
        check("0::/docker/OUTER/kubelet/kubepods/besteffort/podPOD/ID\n", "ID POD -");
        // The node itself.
        check(
            "0::/system.slice/docker-OUTER.scope/system.slice/containerd.service\n",
            "OUTER - containerd",
        );
        check(
            "0::/system.slice/docker-OUTER.scope/kubelet.slice/kubelet.service\n",
            "OUTER - kubelet",
        );
    }

    /// LXC: `DEFAULT_PAYLOAD_CGROUP_PREFIX` in src/lxc/cgroups/cgroup.h, LXC 4.0 and later; `lxc.payload/` and `lxc/` before. LXD
    /// and Incus use it.
    #[test]
    fn lxc() {
        check("0::/lxc.payload.web/system.slice/nginx.service\n", "web - nginx");
        check("0::/lxc.payload.project_web/init.scope\n", "project_web - -");
        check("0::/lxc.monitor.web\n", "- - -");
        check("4:cpu:/lxc/web\n", "web - -");
        check("0::/lxc.payload/web\n", "web - -");
    }

    /// Amazon ECS: `BuildCgroupRoot` in agent/api/task/task_linux.go, amazon-ecs-agent 1.86; Fargate as its documentation of
    /// metadata shows the identifiers.
    #[test]
    fn ecs() {
        check("9:memory:/ecs/STATIC/ID\n", "ID - -");
        check("0::/ecstasks.slice/ecstasks-STATIC.slice/docker-ID.scope\n", "ID - -");
        check("9:memory:/ecs/STATIC/STATIC-1779543207\n", "STATIC-1779543207 - -");
        check("9:memory:/ecs/STATIC/STATIC-x\n", "- - -");
    }

    /// systemd: `cg_escape` in src/basic/cgroup-util.c and `unit_name_escape` in unit-name.c, systemd 256.
    #[test]
    fn units() {
        check("0::/system.slice/nginx.service\n", "- - nginx");
        check(
            "0::/system.slice/system-getty.slice/getty@tty1.service\n",
            "- - getty@tty1",
        );
        let escaped = "system-systemd\\x2dfsck.slice/systemd-fsck@dev-disk-by\\x2duuid.service";
        check(
            &format!("0::/system.slice/{escaped}\n"),
            "- - systemd-fsck@dev-disk-by\\x2duuid",
        );
        check("0::/system.slice/_cpu.service\n", "- - cpu");
        // Of a service that makes groups of its own.
        check("0::/system.slice/postgresql.service/workers\n", "- - postgresql");
        check("0::/user.slice/user-0.slice/session-1.scope\n", "- - -");
        check("0::/init.scope\n", "- - -");
        let user = "0::/user.slice/user-1000.slice/user@1000.service";
        check(&format!("{user}/init.scope\n"), "- - user@1000");
        check(&format!("{user}/app.slice/app-gnome-editor-1234.scope\n"), "- - -");
        check(&format!("{user}/session.slice/pipewire.service\n"), "- - pipewire");
    }

    #[test]
    fn what_is_no_such_path() {
        for wrong in [
            "",
            "0::",
            "x",
            "0::/\n",
            "0::/.service\n",
            "0::/_.service\n",
            "0::/podx/é\n",
            "0::/docker/ID0\n",
            "0::/lxc/\n",
            "0::/lxc.payload.\n",
            "0::/-\n",
        ] {
            check(wrong, "- - -");
        }
        check(&format!("0::/{}/docker/ID\n", "x".repeat(MAX_PATH)), "- - -");
    }
}
