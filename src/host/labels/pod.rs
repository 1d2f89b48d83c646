//! Name and namespace of a pod, from files that the kubelet puts into its containers.

use std::io::Read;

use crate::event::Pid;
use crate::process::root::Root;

/// Bytes of a file that are read: names are shorter.
const MAX_READ: u64 = 512;
/// Shortest name of a host that may be a cut name of a pod: 63 bytes remain, without a hyphen or point at their end
/// (`truncatePodHostnameIfNeeded`, pkg/kubelet/kubelet_pods.go, Kubernetes 1.31).
const CUT: usize = 62;
const HOST_NAME: &str = "/etc/hostname";
/// The service account that is mounted by default.
const NAMESPACE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";

/// What a container's files say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodNames {
    pub name: Option<String>,
    pub namespace: Option<String>,
}

/// The names of the pod of a process. `ours`: our own root directory, whose files say nothing of others; `host`: name of this
/// machine, which pods in its network have, too. A container that is just being made still has our root.
pub fn names(pid: Pid, ours: Option<&Root>, host: &str) -> PodNames {
    let root = Root::of(pid).filter(|root| !root.is_ours && ours.is_some_and(|ours| !root.is_same_directory(ours)));
    root.map_or(PodNames::default(), |root| names_in(&root, host))
}

fn names_in(root: &Root, host: &str) -> PodNames {
    PodNames {
        name: read(root, HOST_NAME).filter(|name| name != host && name.len() < CUT),
        namespace: read(root, NAMESPACE),
    }
}

/// The name that a file of a container has, if it has one.
fn read(root: &Root, path: &str) -> Option<String> {
    let mut bytes = Vec::new();
    root.open(path)?.take(MAX_READ).read_to_end(&mut bytes).ok()?;
    let text = String::from_utf8(bytes).ok()?;
    let name = text.trim_end();
    let is_name = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte);
    (!name.is_empty() && name.len() <= 253 && name.bytes().all(is_name)).then(|| name.to_string())
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn files_of_a_container() {
        let directory = std::env::temp_dir().join(format!("nativeprof-pod-{}", std::process::id()));
        let account = directory.join("run/secrets/kubernetes.io/serviceaccount");
        fs::create_dir_all(directory.join("etc")).expect("a directory");
        fs::create_dir_all(account.join("..2026")).expect("a directory");
        fs::create_dir_all(directory.join("var")).expect("a directory");
        symlink("/run", directory.join("var/run")).expect("a link");
        symlink("..2026", account.join("..data")).expect("a link");
        symlink("..data/namespace", account.join("namespace")).expect("a link");
        fs::write(account.join("..2026/namespace"), "shop").expect("a file");
        let root = Root::example(File::open(&directory).expect("a directory"));
        let hostname = directory.join("etc/hostname");
        let of = |host: &str| names_in(&root, host);
        let some = |text: &str| Some(text.to_string());
        for (content, expected) in [
            ("web-7d4b9c-x2x\n", some("web-7d4b9c-x2x")),
            ("node-1\n", None),
            ("", None),
            ("two\nlines\n", None),
            ("\"quoted\"", None),
            (&"x".repeat(CUT), None),
            (&"x".repeat(1 << 20), None),
        ] {
            fs::write(&hostname, content).expect("a file");
            let expected = PodNames {
                name: expected,
                namespace: some("shop"),
            };
            assert_eq!(of("node-1"), expected, "{content:.40}");
        }
        fs::write(&hostname, b"a\xff").expect("a file");
        assert_eq!(of("").name, None);
        // Links lead to files of the container, not of the machine.
        fs::remove_file(&hostname).expect("it is there");
        symlink("/../../etc/passwd", &hostname).expect("a link");
        fs::remove_file(account.join("namespace")).expect("it is there");
        symlink("/etc", account.join("namespace")).expect("a link");
        assert_eq!(of(""), PodNames::default());
        fs::remove_dir_all(&directory).expect("it is ours");
        // Our own files say nothing of another process with the same root.
        let ours = Root::of(std::process::id());
        assert_eq!(names(std::process::id(), ours.as_ref(), ""), PodNames::default());
    }
}
