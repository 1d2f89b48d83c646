//! Labels of samples: of containers, pods, units and services.

use std::os::unix::fs::symlink;

use prost::Message;
use serde_json::json;

use super::*;

#[test]
fn containers_are_sampled_and_labelled() {
    let _live = live();
    let id = format!("{:064x}", u128::from(std::process::id()) << 64 | 0xfeed);
    let pod = "kubepods-burstable-pod01234567_89ab_cdef_0123_456789abcdef.slice";
    let parent = format!("nativeprof-test-{}.slice", std::process::id());
    let group = Cgroup::new(&[&parent, pod, &format!("cri-containerd-{id}.scope")]);
    let (mut inside, mut other, mut outside) = (service("shop"), service("search"), program());
    group.add(inside.pid());
    group.add(other.pid());
    let scratch = Scratch::new();
    let directory = scratch.path("history");
    let words = [
        "-r",
        "500",
        "--container",
        &id[..60],
        "--label",
        "team=one \"two\"\nthree",
    ];
    let mut running = start(&directory, &words);
    running.read_until("file=0000000002-");
    stop(running);
    inside.finish();
    other.finish();
    outside.finish();
    let all = exported(&scratch, &directory, &[]);
    let of_container = exported(&scratch, &directory, &["--container", &id]);
    assert!(
        all.profile.meta.quality.taken > 100,
        "{} samples",
        all.profile.meta.quality.taken
    );
    assert_eq!(all.profile.meta.quality.taken, of_container.profile.meta.quality.taken);
    let mut otlp = Vec::new();
    for (_, bytes) in segments(&directory) {
        otlp.extend(unpacked(&bytes));
    }
    for text in [&*id, "01234567-89ab-cdef-0123-456789abcdef", "one \"two\"\nthree"] {
        let is_there = otlp.windows(text.len()).any(|part| part == text.as_bytes());
        assert!(is_there, "no label is {text}");
    }
    // Receivers get as many samples of each service and container as are read here.
    let samples = |service: &str| {
        let words = ["--service", service, "--container", &id];
        exported(&scratch, &directory, &words).profile.meta.quality.taken
    };
    let expected = BTreeMap::from(["shop", "search"].map(|name| (format!("{name} in {id}"), samples(name))));
    assert_eq!(expected.values().sum::<u64>(), all.profile.meta.quality.taken);
    for (scheme, receiver) in [("", Receiver::start("")), ("grpc+", Receiver::of_grpc("", &[]))] {
        let url = format!("{scheme}{}", receiver.url());
        let done = nativeprof(&["push", "--once", "--to", &url])
            .arg(&directory)
            .output()
            .expect("nativeprof runs");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        let mut received = BTreeMap::<String, u64>::new();
        for request in receiver.end() {
            for (place, total) in request["totals"].as_object().expect("totals") {
                *received.entry(place.clone()).or_default() += total.as_u64().expect("a number");
            }
        }
        assert_eq!(received, expected, "{url}");
    }
}

/// A program that says which service it is.
fn service(name: &str) -> Program {
    let mut command = newest_python().script("shares.py");
    command.env("OTEL_SERVICE_NAME", name);
    Program::start(command)
}

/// A pod's only container, which uses the CPU for some time.
struct Container {
    id: String,
    running: Child,
}

/// Starts it with files as the kubelet makes them.
fn container(scratch: &Scratch, cgroups: &str, id: &str, seconds: &str, environment: &[&str]) -> Container {
    let bundle = scratch.path(&id[..8]);
    let root = bundle.join("rootfs");
    let account = root.join("run/secrets/kubernetes.io/serviceaccount");
    for directory in ["etc", "proc", "srv", "var"] {
        fs::create_dir_all(root.join(directory)).expect("a directory");
    }
    fs::create_dir_all(account.join("..2026")).expect("a directory");
    symlink("/run", root.join("var/run")).expect("a link");
    symlink("..2026", account.join("..data")).expect("a link");
    symlink("..data/namespace", account.join("namespace")).expect("a link");
    fs::write(account.join("..2026/namespace"), "shop").expect("a file");
    fs::write(root.join("etc/hostname"), format!("pod-{}\n", &id[..8])).expect("a file");
    let script = "import sys, time\nwhile time.process_time() < float(sys.argv[1]):\n    pass\n";
    fs::write(root.join("srv/worker.py"), script).expect("a file");
    let mut mounts = vec![json!({"destination": "/proc", "type": "proc", "source": "proc"})];
    // An interpreter, wherever it is, and its libraries are those of the machine.
    for entry in fs::read_dir("/").expect("the root").flatten() {
        let path = entry.path();
        let inside = root.join(entry.file_name());
        if path.is_dir() && !inside.exists() && !path.starts_with("/sys") && !path.starts_with("/dev") {
            fs::create_dir(inside).expect("a directory");
            mounts.push(json!({"destination": path, "type": "none", "source": path, "options": ["rbind", "ro"]}));
        }
    }
    let environment: Vec<&str> = environment
        .iter()
        .copied()
        .chain(["PYTHONDONTWRITEBYTECODE=1"])
        .collect();
    let config = json!({
        "ociVersion": "1.0.2",
        "process": {
            "terminal": false, "user": {"uid": 0, "gid": 0}, "cwd": "/", "env": environment,
            "args": [installed_python().exe, "-u", "/srv/worker.py", seconds, "--password=secret"],
        },
        "root": {"path": "rootfs", "readonly": true},
        "mounts": mounts,
        "linux": {
            "namespaces": [{"type": "pid"}, {"type": "mount"}, {"type": "uts"}],
            "cgroupsPath": format!("/{cgroups}/kubepods/besteffort/pod{}/{id}", pod_of(id)),
        },
    });
    fs::write(bundle.join("config.json"), config.to_string()).expect("a file");
    let mut runc = Command::new("runc");
    runc.arg("--root").arg(scratch.path("runc")).args(["run", "--bundle"]);
    runc.arg(&bundle).arg(id).stdin(Stdio::null());
    Container {
        id: id.into(),
        running: runc.spawn().expect("runc, which .ci/setup installs"),
    }
}

/// The identifier of the pod of a container.
fn pod_of(id: &str) -> String {
    format!("12345678-1234-1234-1234-{}", &id[..12])
}

/// Samples of a history by the labels of their resources, as `KEY=VALUE KEY=VALUE`, without the host's name.
fn samples_by_labels(directory: &Path) -> BTreeMap<String, usize> {
    let mut found = BTreeMap::new();
    for (path, bytes) in segments(directory) {
        let segment = otlp::Segment::decode(&*unpacked(&bytes)).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        for resource in segment.resources {
            let attributes = resource.resource.expect("a resource").attributes.into_iter();
            let labels = attributes.filter(|a| a.key != "host.name");
            let labels = labels.map(|a| format!("{}={}", a.key, a.value.unwrap_or_default().text));
            let labels = labels.collect::<Vec<_>>().join(" ");
            let samples = resource.scopes.iter().flat_map(|scope| &scope.profiles);
            let samples = samples.flat_map(|profile| &profile.samples);
            *found.entry(labels).or_default() += samples.map(|sample| sample.times.len()).sum::<usize>();
        }
    }
    found
}

/// What of OTLP profiles (proto 1.11.0) says which samples a resource has.
mod otlp {
    use prost::Message;

    #[derive(Clone, PartialEq, Message)]
    pub struct Segment {
        #[prost(message, repeated, tag = "1")]
        pub resources: Vec<ResourceProfiles>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub struct ResourceProfiles {
        #[prost(message, optional, tag = "1")]
        pub resource: Option<Resource>,
        #[prost(message, repeated, tag = "2")]
        pub scopes: Vec<Scope>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub struct Resource {
        #[prost(message, repeated, tag = "1")]
        pub attributes: Vec<Attribute>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub struct Attribute {
        #[prost(string, tag = "1")]
        pub key: String,
        #[prost(message, optional, tag = "2")]
        pub value: Option<Value>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub struct Value {
        #[prost(string, tag = "1")]
        pub text: String,
    }

    #[derive(Clone, PartialEq, Message)]
    pub struct Scope {
        #[prost(message, repeated, tag = "2")]
        pub profiles: Vec<Profile>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub struct Profile {
        #[prost(message, repeated, tag = "2")]
        pub samples: Vec<Sample>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub struct Sample {
        #[prost(fixed64, repeated, tag = "5")]
        pub times: Vec<u64>,
    }
}

#[test]
fn containers_and_units_have_their_labels() {
    let _live = live();
    let scratch = Scratch::new();
    let directory = scratch.path("history");
    let tree = CgroupTree(format!("nativeprof-labels-{}", std::process::id()));
    let unit = Cgroup::new(&[&tree.0, "system.slice", "shop@1.service"]);
    let plain = Cgroup::new(&[&tree.0, "plain"]);
    let python = installed_python();
    let group = format!("/{}", tree.0);
    let running = start(&directory, &["-r", "500", "--segment", "1m", "--cgroup", &group]);
    let ids = ["a", "b"].map(|digit| digit.repeat(64));
    let containers = [
        container(&scratch, &tree.0, &ids[0], "0.5", &[]),
        container(&scratch, &tree.0, &ids[1], "1.0", &["OTEL_SERVICE_NAME=web"]),
    ];
    // Waits until it is in its group, uses the CPU, and executes another program.
    let shell = |group: &Cgroup, more: &str| {
        let busy = format!("read go; i=0; while [ $i -lt 150000 ]; do i=$((i+1)); done; {more}");
        let mut child = Command::new("sh")
            .args(["-c", &busy])
            .arg("--password=secret")
            .stdin(Stdio::piped())
            .spawn()
            .expect("a shell");
        group.add(child.id());
        child
            .stdin
            .take()
            .expect("a pipe")
            .write_all(b"go\n")
            .expect("it reads");
        child
    };
    let script = scratch.path("again.py");
    fs::write(&script, "i = 0\nwhile i < 3000000:\n    i += 1\n").expect("a script");
    let exec = format!("exec {} {}", python.exe.display(), script.display());
    let others = [shell(&unit, ":"), shell(&plain, &exec)];
    let [first, second] = containers.map(|container| {
        let done = container.running.wait_with_output().expect("its end");
        assert!(done.status.success(), "runc: {}", done.status);
        container.id
    });
    for mut other in others {
        other.wait().expect("its end");
    }
    let log = stop(running);
    drop(tree);
    let pod = |id: &str, service: &str| {
        let name = &id[..8];
        let uid = pod_of(id);
        let pod = format!("k8s.namespace.name=shop k8s.pod.name=pod-{name} k8s.pod.uid={uid}");
        format!("container.id={id} {pod} service.name={service}")
    };
    let expected = [
        pod(&first, "worker.py"),
        pod(&second, "web"),
        "service.name=shop@1".into(),
        "service.name=sh".into(),
        "service.name=again.py".into(),
    ];
    let mut found = samples_by_labels(&directory);
    // runc itself, until it executes the program, is in the container's group.
    found.retain(|labels, _| !labels.contains("service.name=runc") && !labels.contains("service.name=exe"));
    for labels in &expected {
        let samples = found.remove(labels).unwrap_or(0);
        assert!(samples > 0, "no samples of {labels}; others: {found:#?}\n{log}");
    }
    let metrics = fs::read_to_string(directory.join("metrics.prom")).unwrap_or_default();
    assert!(found.is_empty(), "other labels: {found:#?}\n{log}\n{metrics}");
}
