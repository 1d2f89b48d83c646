//! The files in `deploy/`, judged by the tools of those who use them, and run with what they give.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use common::{Scratch, nativeprof, viewers, with_capabilities};

mod common;

/// Exposure in tenths that `systemd-analyze security` may find at most.
const MAX_EXPOSURE: &str = "40";

#[test]
fn the_unit_is_hardened() {
    let output = Command::new("systemd-analyze")
        .args(["security", "--offline=yes"])
        .arg(format!("--threshold={MAX_EXPOSURE}"))
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/nativeprof.service"))
        .output()
        .expect("systemd-analyze: install the package systemd");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn the_unit_has_no_fault() {
    let text = fs::read_to_string("deploy/nativeprof.service").expect("the unit");
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("nativeprof.service");
    // The program that the unit starts has to exist.
    let text = text.replace("/usr/bin/nativeprof", env!("CARGO_BIN_EXE_nativeprof"));
    fs::write(&path, text).expect("written");
    let output = Command::new("systemd-analyze")
        .arg("verify")
        .arg(&path)
        .output()
        .expect("systemd-analyze: install the package systemd");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && errors.is_empty(), "{errors}");
}

/// What a container is started with.
struct Container {
    /// Names without `CAP_`.
    capabilities: BTreeSet<String>,
    arguments: Vec<String>,
}

const MANIFEST: &str = "deploy/daemonset.yaml";
const OLDER_MANIFEST: &str = "deploy/daemonset-1.29.yaml";

/// The documents of a manifest, and the versions of Kubernetes that refuse one of them.
fn manifest(path: &str, versions: std::ops::RangeInclusive<u32>) -> (Vec<Value>, Vec<String>) {
    let output = Command::new(viewers("grpc/bin/python"))
        .arg("tests/deploy/manifest.py")
        .arg(path)
        .args(versions.map(|minor| format!("1.{minor}")))
        .output()
        .expect("Python starts");
    let errors = String::from_utf8_lossy(&output.stderr);
    let mut report: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {errors}"));
    let refused = report["refused"]
        .as_object()
        .expect("an object")
        .keys()
        .cloned()
        .collect();
    (
        serde_json::from_value(report["documents"].take()).expect("a list"),
        refused,
    )
}

fn words(list: &Value) -> Vec<String> {
    serde_json::from_value(list.clone()).expect("a list of words")
}

impl Container {
    fn of_manifest(documents: &[Value]) -> Container {
        let container = &documents[1]["spec"]["template"]["spec"]["containers"][0];
        Container {
            capabilities: words(&container["securityContext"]["capabilities"]["add"])
                .into_iter()
                .collect(),
            arguments: words(&container["args"]),
        }
    }

    /// The command in the comment of the recipe.
    fn of_recipe() -> Container {
        let text = fs::read_to_string("deploy/Containerfile").expect("the recipe");
        let capabilities = text
            .split_whitespace()
            .filter_map(|word| word.strip_prefix("--cap-add="));
        let command = text.lines().find_map(|line| line.strip_prefix("CMD "));
        Container {
            capabilities: capabilities.map(str::to_string).collect(),
            arguments: serde_json::from_str(command.expect("a command")).expect("a list"),
        }
    }

    fn of_unit() -> Container {
        let text = fs::read_to_string("deploy/nativeprof.service").expect("the unit");
        let value = |key: &str| {
            let value = text.lines().find_map(|line| line.strip_prefix(key));
            value.unwrap_or_else(|| panic!("no {key}")).split_whitespace()
        };
        Container {
            capabilities: value("CapabilityBoundingSet=")
                .map(|name| name.trim_start_matches("CAP_").to_string())
                .collect(),
            arguments: value("ExecStart=/usr/bin/nativeprof ").map(str::to_string).collect(),
        }
    }
}

/// Schemas of the versions that are in use, without fields that they do not know.
#[test]
fn manifests_are_valid() {
    let (documents, refused) = manifest(MANIFEST, 29..=36);
    assert_eq!(refused, ["1.29"], "only versions without `appArmorProfile` refuse it");
    let (mut older, refused) = manifest(OLDER_MANIFEST, 29..=36);
    assert!(refused.is_empty(), "{refused:?}");
    // They differ in this alone.
    let template = &mut older[1]["spec"]["template"];
    let annotations = template["metadata"]["annotations"].as_object_mut().expect("an object");
    let profile = annotations.remove("container.apparmor.security.beta.kubernetes.io/nativeprof");
    assert_eq!(profile, Some(json!("unconfined")));
    template["spec"]["containers"][0]["securityContext"]["appArmorProfile"] = json!({"type": "Unconfined"});
    assert_eq!(older, documents);
    let pod = &documents[1]["spec"]["template"]["spec"];
    let context = &pod["containers"][0]["securityContext"];
    for (is, expected) in [
        (&pod["hostPID"], json!(true)),
        (&context["privileged"], json!(false)),
        (&context["readOnlyRootFilesystem"], json!(true)),
        (&context["allowPrivilegeEscalation"], json!(false)),
        (&context["capabilities"]["drop"], json!(["ALL"])),
    ] {
        assert_eq!(*is, expected, "{context}");
    }
    // What is written to is mounted.
    let directory = words(&pod["containers"][0]["args"])
        .into_iter()
        .find_map(|word| word.strip_prefix("--dir=").map(str::to_string));
    let mounts = pod["containers"][0]["volumeMounts"].as_array().expect("mounts");
    let writable = mounts
        .iter()
        .filter(|mount| mount["readOnly"] != true)
        .map(|mount| &mount["mountPath"]);
    assert_eq!(writable.collect::<Vec<_>>(), [&json!(directory)]);
}

/// Each file gives the capabilities that `doctor --host` asks for, and no others; with these the command that it starts records.
#[test]
fn what_the_files_start_works_with_what_they_give() {
    let report = nativeprof(&["doctor", "--host", "--json"])
        .output()
        .expect("nativeprof starts");
    let report: Value = serde_json::from_slice(&report.stdout).expect("JSON");
    let findings = report["host"]["findings"].as_array().expect("findings");
    let needed: BTreeSet<String> = findings
        .iter()
        .filter_map(|finding| finding["subject"].as_str()?.strip_prefix("CAP_"))
        .map(str::to_string)
        .collect();
    let (recipe, unit) = (Container::of_recipe(), Container::of_unit());
    assert_eq!(recipe.capabilities, needed);
    assert_eq!(recipe.arguments.join(" ").replace('=', " "), unit.arguments.join(" "));
    let daemonset = Container::of_manifest(&manifest(MANIFEST, 30..=30).0);
    for (file, container) in [("daemonset", daemonset), ("unit", unit)] {
        assert_eq!(container.capabilities, needed, "{file}");
        let scratch = Scratch::new();
        let directory = scratch.directory().to_str().expect("UTF-8");
        let address = format!("--metrics=unix:{directory}/metrics");
        let arguments = container.arguments.iter().map(|word| match word.split_once('=') {
            Some(("--metrics", _)) => address.clone(),
            _ => (word.replace("/var/lib/nativeprof", directory))
                .replace("$(NODE_IP)", "127.0.0.1")
                .replace("$(NODE_NAME)", "node-1")
                .replace("http://127.0.0.1:4318", "http://127.0.0.1:1"),
        });
        let set: String = container
            .capabilities
            .iter()
            .map(|name| format!(",+{}", name.to_lowercase()))
            .collect();
        let done = with_capabilities(&format!("-all{set}"))
            .args(["--no-new-privs", env!("CARGO_BIN_EXE_nativeprof")])
            .args(arguments)
            .args(["--duration=0.3", "--segment=1s"])
            // Others are not needed here.
            .arg(format!("--pid={}", std::process::id()))
            .output()
            .expect("setpriv starts");
        let log = String::from_utf8_lossy(&done.stderr).into_owned();
        let events = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let names: Vec<String> = events.map(|event| event["event"].to_string()).collect();
        assert!(done.status.success(), "{file}: {log}");
        for (event, is_there) in [
            ("started", true),
            ("segment", true),
            ("stopped", true),
            ("limited", false),
        ] {
            assert_eq!(
                names.contains(&format!("\"{event}\"")),
                is_there,
                "{file}, {event}: {log}"
            );
        }
    }
}

/// At higher levels, kernels of Debian and Ubuntu want a capability that no file gives.
#[test]
fn the_setting_of_the_kernel_is_the_one_that_is_advised() {
    let text = fs::read_to_string("deploy/60-nativeprof.conf").expect("the setting");
    let settings: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    assert_eq!(settings, ["kernel.perf_event_paranoid = 2"]);
}

/// The recipe takes the program from where `.ci/package` puts it, and needs nothing else in the image.
#[test]
fn the_recipe_is_complete() {
    let text = fs::read_to_string("deploy/Containerfile").expect("the recipe");
    let lines: Vec<(&str, &str)> = text
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(|line| line.split_once(' ').expect("an instruction and its words"))
        .collect();
    let instructions: Vec<&str> = lines.iter().map(|(instruction, _)| *instruction).collect();
    assert_eq!(instructions, ["FROM", "COPY", "ENV", "VOLUME", "ENTRYPOINT", "CMD"]);
    let of = |name: &str| {
        lines
            .iter()
            .find(|(instruction, _)| *instruction == name)
            .expect("there")
            .1
    };
    let (source, place) = of("COPY").split_once(' ').expect("two paths");
    assert_eq!((of("FROM"), source), ("scratch", "nativeprof"));
    let entry: Vec<String> = serde_json::from_str(of("ENTRYPOINT")).expect("a list");
    assert_eq!(entry, [place]);
    assert!(
        Container::of_recipe()
            .arguments
            .contains(&format!("--dir={}", of("VOLUME")))
    );
    let package = fs::read_to_string(".ci/package").expect("the script");
    assert!(package.contains("\"$out/nativeprof\"") && text.contains("target/package"));
}

/// Alerts are rules of Prometheus about metrics that there are.
#[test]
fn alerts_are_about_metrics_that_exist() {
    let output = Command::new(viewers("promtool"))
        .args(["check", "rules", "deploy/alerts.yaml"])
        .output()
        .expect("promtool starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let sources =
        ["src/host/metrics.rs", "src/push/metrics.rs"].map(|path| fs::read_to_string(path).expect("a source"));
    let [of_host, of_push] = sources;
    let rules = fs::read_to_string("deploy/alerts.yaml").expect("the rules");
    let words = rules.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    let names: BTreeSet<&str> = words.filter_map(|word| word.strip_prefix("nativeprof_")).collect();
    assert!(names.len() > 8, "{names:?}");
    for name in names {
        let is_there = match name.strip_prefix("push_") {
            Some(name) => of_push.contains(&format!("\"{name}\"")),
            None => of_host.contains(&format!("\"{name}\"")),
        };
        assert!(is_there, "there is no metric nativeprof_{name}");
    }
}
