//! `status` as metrics: OpenMetrics 1.0, or Prometheus' older text format for those who do not ask for it.
//!
//! Names end with their unit, counters with `_total`; a VM and a disk are labels. What a VM's entry does not have is left out, so
//! a VM that is being prepared has its state and nothing else.

use super::snapshot;
use serde_json::Value;
use std::fmt::Write;

/// How it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// `application/openmetrics-text`.
    OpenMetrics,
    /// `text/plain; version=0.0.4`.
    Plain,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Counter,
    Gauge,
    Histogram,
}

/// The states a VM can be in; each is a time series, and one of them is 1.
pub const STATES: &[&str] = &["preparing", "waiting", "running", "recovering", "failed", "restarting", "held"];

/// Where a sample stands in a disk's entry, and its label besides VM and disk.
type Samples = &'static [(&'static str, &'static str)];

/// Of a disk: the metric's name, what it is, where it stands in the disk's entry, and its label besides VM and disk.
const OF_DISKS: &[(&str, Kind, &str, Samples)] = &[
    (
        "disk_requests",
        Kind::Counter,
        "Requests of the guest.",
        &[
            ("/io/read_requests", "op=\"read\""),
            ("/io/write_requests", "op=\"write\""),
            ("/io/flush_requests", "op=\"flush\""),
            ("/io/discard_requests", "op=\"discard\""),
            ("/io/write_zeroes_requests", "op=\"write_zeroes\""),
        ],
    ),
    (
        "disk_request_bytes",
        Kind::Counter,
        "Bytes that the guest has read and written.",
        &[("/io/read_bytes", "op=\"read\""), ("/io/write_bytes", "op=\"write\"")],
    ),
    ("disk_failed_requests", Kind::Counter, "Requests that ended with an I/O error.", &[("/io/failed_requests", "")]),
    (
        "disk_unsupported_requests",
        Kind::Counter,
        "Requests that ended as not supported.",
        &[("/io/unsupported_requests", "")],
    ),
    (
        "disk_malformed_chains",
        Kind::Counter,
        "Descriptor chains of the guest that were no request, and queues stopped for what they said.",
        &[("/io/malformed_chains", "")],
    ),
    (
        "disk_storage_bytes",
        Kind::Counter,
        "Bytes read from and written to storage.",
        &[("/io/storage_read_bytes", "op=\"read\""), ("/io/storage_write_bytes", "op=\"write\"")],
    ),
    ("disk_storage_flushes", Kind::Counter, "Flushes sent to storage.", &[("/io/storage_flushes", "")]),
    (
        "disk_journal_received_bytes",
        Kind::Counter,
        "Bytes that the guest has written to its journals.",
        &[("/counters/journal_bytes_received", "")],
    ),
    (
        "disk_journal_storage_bytes",
        Kind::Counter,
        "Bytes of these that went to the journals' places on storage.",
        &[("/counters/journal_bytes_to_storage", "")],
    ),
    (
        "disk_home_bytes",
        Kind::Counter,
        "Bytes written to storage outside of journals.",
        &[("/counters/home_bytes_to_storage", "")],
    ),
    ("disk_transactions", Kind::Counter, "Transactions committed.", &[("/counters/transactions", "")]),
    ("disk_committed_blocks", Kind::Counter, "Blocks committed.", &[("/counters/blocks_committed", "")]),
    (
        "disk_protected_pages",
        Kind::Counter,
        "Pages protected in the guest's memory.",
        &[("/counters/pages_protected", "")],
    ),
    ("disk_copied_pages", Kind::Counter, "Pages copied at a commit.", &[("/counters/pages_copied", "")]),
    ("disk_page_faults", Kind::Counter, "Protected pages that the guest wrote to.", &[("/counters/cow_faults", "")]),
    (
        "disk_written_home_blocks",
        Kind::Counter,
        "Blocks that amberlog wrote home itself, to make room.",
        &[("/counters/written_home_by_host", "")],
    ),
    (
        "disk_owed_blocks",
        Kind::Gauge,
        "Committed blocks that are held and not home: what is written home when the guest dies.",
        &[("/counters/blocks_retained_now", "")],
    ),
    ("disk_copied_bytes", Kind::Gauge, "Host memory for copied blocks.", &[("/counters/pool_bytes_now", "")]),
    ("disk_size_bytes", Kind::Gauge, "Size that the guest sees.", &[("/io/size_bytes", "")]),
    (
        "disk_oldest_undurable_seconds",
        Kind::Gauge,
        "Age of the oldest transaction that a loss of the host's power would take back.",
        &[("/durability/oldest_undurable_s", "")],
    ),
    (
        "disk_durable_within_seconds",
        Kind::Gauge,
        "How old what is committed may be before it is durable on storage: what is in force.",
        &[("/durability/within_s", "")],
    ),
    (
        "disk_durable_within_wished_seconds",
        Kind::Gauge,
        "The same, as it was asked for.",
        &[("/durable_within_wished_s", "")],
    ),
    (
        "disk_compounds",
        Kind::Counter,
        "Compound transactions written to the journals' places.",
        &[("/durability/compounds", "")],
    ),
    ("disk_rings_started", Kind::Gauge, "1 while a driver uses the disk.", &[("/rings_started", "")]),
];

/// Of the host: the metric's name, where it stands in the daemon's `memory`, and what it is.
const OF_MEMORY: &[(&str, &str, &str)] = &[
    ("memory_budget_bytes", "budget_bytes", "Budget for tables and copied blocks of all VMs together."),
    ("memory_held_bytes", "held_bytes", "What they take of it."),
    ("memory_level_bytes", "level_bytes", "What no VM is to hold more than, while the budget was passed."),
    ("memory_stuck", "is_stuck", "1 while the budget is passed and no VM has more to give back."),
];

/// Of a VM's `memory`: the metric's name, where it stands there, and what it is.
const OF_AREAS: &[(&str, Kind, &str, &str)] = &[
    ("vm_memory_held_bytes", Kind::Gauge, "held_bytes", "Host memory for tables and copied blocks of the VM."),
    ("vm_memory_shrinks", Kind::Counter, "shrinks", "How often the VM was told to shrink for the budget of all VMs."),
];

/// Of a disk: histograms.
const HISTOGRAMS: &[(&str, &str, Samples)] = &[
    (
        "disk_request_seconds",
        "From a request's arrival to its answer.",
        &[
            ("/latency/read", "op=\"read\""),
            ("/latency/write", "op=\"write\""),
            ("/latency/flush", "op=\"flush\""),
            ("/latency/discard", "op=\"discard\""),
        ],
    ),
    ("disk_commit_seconds", "The same, of writes with a journal's commit block.", &[("/latency/commit", "")]),
    (
        "disk_storage_seconds",
        "How long storage took; under a held placement writes are home writes.",
        &[
            ("/latency/storage_read", "op=\"read\""),
            ("/latency/storage_write", "op=\"write\""),
            ("/latency/storage_flush", "op=\"flush\""),
        ],
    ),
    ("disk_compound_seconds", "How long a compound transaction took to be durable.", &[("/latency/compound", "")]),
];

/// What may stand between the quotes of a label.
fn escaped(text: &str) -> String {
    text.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n")
}

struct Output {
    text: String,
    format: Format,
    /// The name and head of the metric at hand, written with its first sample.
    head: Option<String>,
}

impl Output {
    fn begin(&mut self, name: &str, kind: Kind, help: &str) {
        let word = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        };
        let suffix = if kind == Kind::Counter && self.format == Format::Plain { "_total" } else { "" };
        let mut head = format!("# HELP amberlog_{name}{suffix} {help}\n# TYPE amberlog_{name}{suffix} {word}\n");
        for unit in ["seconds", "bytes"] {
            if self.format == Format::OpenMetrics && name.ends_with(&format!("_{unit}")) {
                let _ = writeln!(head, "# UNIT amberlog_{name} {unit}");
            }
        }
        self.head = Some(head);
    }

    fn sample(&mut self, name: &str, labels: &str, value: &str) {
        if let Some(head) = self.head.take() {
            self.text += &head;
        }
        let labels = if labels.is_empty() { String::new() } else { format!("{{{labels}}}") };
        let _ = writeln!(self.text, "amberlog_{name}{labels} {value}");
    }

    fn number(&mut self, name: &str, kind: Kind, labels: &str, value: &Value) {
        let value = match value {
            Value::Number(number) => number.to_string(),
            Value::Bool(is) => u8::from(*is).to_string(),
            _ => return,
        };
        let suffix = if kind == Kind::Counter { "_total" } else { "" };
        self.sample(&format!("{name}{suffix}"), labels, &value);
    }

    fn histogram(&mut self, name: &str, labels: &str, value: &Value) {
        let Some(snapshot) = snapshot(value) else { return };
        let mut below = 0;
        for index in 0..latency::BOUNDED {
            below += snapshot.buckets.get(index).copied().unwrap_or_default();
            let bound = latency::bound_seconds(index).unwrap_or_default();
            // Rust writes 1e-6 as 0.000001, as everybody reads it.
            self.sample(&format!("{name}_bucket"), &format!("{labels},le=\"{bound}\""), &below.to_string());
        }
        let count = snapshot.count().to_string();
        self.sample(&format!("{name}_bucket"), &format!("{labels},le=\"+Inf\""), &count);
        self.sample(&format!("{name}_sum"), labels, &(snapshot.sum_ns as f64 / 1e9).to_string());
        self.sample(&format!("{name}_count"), labels, &count);
    }
}

/// Everything of all VMs. `status` is the answer to that question: `{"vms":[...]}`.
pub fn render(status: &Value, format: Format) -> String {
    let vms: Vec<&Value> = status["vms"].as_array().into_iter().flatten().collect();
    let name_of = |value: &Value, key: &str| escaped(value[key].as_str().unwrap_or_default());
    let disks: Vec<(String, &Value)> = vms
        .iter()
        .flat_map(|vm| {
            let vm_name = name_of(vm, "vm");
            vm["disks"].as_array().into_iter().flatten().map(move |disk| {
                (format!("vm=\"{vm_name}\",disk=\"{}\"", escaped(disk["name"].as_str().unwrap_or_default())), disk)
            })
        })
        .collect();
    let mut output = Output { text: String::new(), format, head: None };

    output.begin("build_info", Kind::Gauge, "The version that runs.");
    output.sample("build_info", &format!("version=\"{}\"", env!("CARGO_PKG_VERSION")), "1");
    output.begin("vm_state", Kind::Gauge, "1 for the state that the VM is in.");
    for vm in &vms {
        let now = vm["state"].as_str().unwrap_or_default();
        // A state that is not known here is not lost.
        let unknown = (!STATES.contains(&now) && !now.is_empty()).then_some(now);
        for state in STATES.iter().copied().chain(unknown) {
            let labels = format!("vm=\"{}\",state=\"{}\"", name_of(vm, "vm"), escaped(state));
            output.sample("vm_state", &labels, if state == now { "1" } else { "0" });
        }
    }
    output.begin("vm_restarts", Kind::Counter, "How often the process that serves the VM was started again.");
    for vm in &vms {
        output.number("vm_restarts", Kind::Counter, &format!("vm=\"{}\"", name_of(vm, "vm")), &vm["restarts"]);
    }
    output.begin("vm_pending", Kind::Gauge, "1 when the configuration says what is not so before the VMM has ended.");
    for vm in &vms {
        let is_pending = if vm["pending"].is_string() { "1" } else { "0" };
        output.sample("vm_pending", &format!("vm=\"{}\"", name_of(vm, "vm")), is_pending);
    }
    for (name, pointer, help) in OF_MEMORY {
        output.begin(name, Kind::Gauge, help);
        output.number(name, Kind::Gauge, "", &status["memory"][*pointer]);
    }
    for (name, kind, pointer, help) in OF_AREAS {
        output.begin(name, *kind, help);
        for vm in &vms {
            output.number(name, *kind, &format!("vm=\"{}\"", name_of(vm, "vm")), &vm["memory"][*pointer]);
        }
    }
    output.begin("vm_fault_seconds", Kind::Histogram, "How long a guest's write to a protected page waited here.");
    for vm in &vms {
        output.histogram("vm_fault_seconds", &format!("vm=\"{}\"", name_of(vm, "vm")), &vm["latency"]["fault"]);
    }
    output.begin(
        "disk_placement_info",
        Kind::Gauge,
        "Where the journals live by their placement, where they really do, and why that is another place.",
    );
    for (labels, disk) in &disks {
        let labels = format!(
            "{labels},placement=\"{}\",effective=\"{}\",reason=\"{}\"",
            name_of(disk, "placement"),
            name_of(disk, "placement_effective"),
            name_of(disk, "placement_reason")
        );
        output.sample("disk_placement_info", &labels, "1");
    }
    output.begin("disk_placement_differs", Kind::Gauge, "1 when journals do not live where they are configured to.");
    for (labels, disk) in &disks {
        // Where a command has moved the journals, `placement` says so too: the reason alone says that they are elsewhere than configured.
        let is_elsewhere = disk["placement_effective"] != disk["placement"] && disk["placement_effective"].is_string();
        let differs = is_elsewhere || disk["placement_reason"].is_string();
        output.sample("disk_placement_differs", labels, if differs { "1" } else { "0" });
    }
    output.begin("disk_fault", Kind::Gauge, "1 when something is wrong with the disk; status says what.");
    for (labels, disk) in &disks {
        output.sample("disk_fault", labels, if disk["fault"].is_string() { "1" } else { "0" });
    }
    output.begin("disk_durable_within_unmet", Kind::Gauge, "1 while less is in force than durable-within asks for.");
    for (labels, disk) in disks.iter().filter(|(_, disk)| disk["durable_within_wished_s"].is_u64()) {
        // Of a worker of an earlier program it is not known.
        let Some(unmet_for_s) = disk.get("durable_within_unmet_for_s") else { continue };
        output.sample("disk_durable_within_unmet", labels, if unmet_for_s.is_u64() { "1" } else { "0" });
    }
    for (name, kind, help, samples) in OF_DISKS {
        output.begin(name, *kind, help);
        for (labels, disk) in &disks {
            for (pointer, label) in *samples {
                let Some(value) = disk.pointer(pointer) else { continue };
                output.number(name, *kind, &with(labels, label), value);
            }
        }
    }
    for (name, help, samples) in HISTOGRAMS {
        output.begin(name, Kind::Histogram, help);
        for (labels, disk) in &disks {
            for (pointer, label) in *samples {
                let Some(value) = disk.pointer(pointer) else { continue };
                output.histogram(name, &with(labels, label), value);
            }
        }
    }
    if format == Format::OpenMetrics {
        output.text += "# EOF\n";
    }
    output.text
}

fn with(labels: &str, label: &str) -> String {
    if label.is_empty() { labels.to_owned() } else { format!("{labels},{label}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn status() -> Value {
        json!({"memory": {"budget_bytes": 4096, "held_bytes": 99, "level_bytes": null, "is_stuck": false}, "vms": [
            {"vm": "db", "state": "running", "memory": {"held_bytes": 99, "shrinks": 2}, "latency": {"fault": {"buckets": [0, 2], "sum_ns": 3000}}, "disks": [{
                "name": "a\"b", "placement": "retain", "placement_effective": "copy", "placement_reason": "a\nb\\",
                "io": {"read_requests": 7, "size_bytes": 4096}, "counters": {"blocks_retained_now": 5},
                "latency": {"commit": {"buckets": [1, 0, 4], "sum_ns": 2_500_000_000u64}},
                "rings_started": true, "fault": null,
            }]},
            {"vm": "new", "state": "preparing", "disks": []},
        ]})
    }

    #[test]
    fn what_is_there_is_written_and_what_is_not_is_left_out() {
        let text = render(&status(), Format::OpenMetrics);
        for line in [
            "amberlog_memory_budget_bytes 4096",
            "amberlog_memory_stuck 0",
            "amberlog_vm_memory_held_bytes{vm=\"db\"} 99",
            "amberlog_vm_memory_shrinks_total{vm=\"db\"} 2",
            "amberlog_vm_state{vm=\"db\",state=\"running\"} 1",
            "amberlog_vm_state{vm=\"new\",state=\"running\"} 0",
            "# TYPE amberlog_disk_requests counter",
            r#"amberlog_disk_requests_total{vm="db",disk="a\"b",op="read"} 7"#,
            r#"amberlog_disk_placement_info{vm="db",disk="a\"b",placement="retain",effective="copy",reason="a\nb\\"} 1"#,
            r#"amberlog_disk_placement_differs{vm="db",disk="a\"b"} 1"#,
            r#"amberlog_disk_owed_blocks{vm="db",disk="a\"b"} 5"#,
            r#"amberlog_disk_rings_started{vm="db",disk="a\"b"} 1"#,
            "# UNIT amberlog_disk_commit_seconds seconds",
            r#"amberlog_disk_commit_seconds_bucket{vm="db",disk="a\"b",le="0.000001"} 1"#,
            r#"amberlog_disk_commit_seconds_bucket{vm="db",disk="a\"b",le="0.000004"} 5"#,
            r#"amberlog_disk_commit_seconds_bucket{vm="db",disk="a\"b",le="+Inf"} 5"#,
            r#"amberlog_disk_commit_seconds_sum{vm="db",disk="a\"b"} 2.5"#,
            r#"amberlog_vm_fault_seconds_count{vm="db"} 2"#,
        ] {
            assert!(text.lines().any(|there| there == line), "{line} is not in\n{text}");
        }
        assert!(text.ends_with("# EOF\n"));
        for absent in ["vm_restarts", "disk_compounds", "op=\"flush\"", "disk_transactions"] {
            assert!(!text.contains(absent), "{absent}: {text}");
        }
    }

    #[test]
    fn journals_that_a_command_has_moved_do_not_live_where_they_are_configured_to() {
        let differs = |reason: Value| {
            let disk = json!({"name": "d", "placement": "storage", "placement_effective": "storage", "placement_reason": reason});
            let text = render(&json!({"vms": [{"vm": "x", "state": "running", "disks": [disk]}]}), Format::Plain);
            text.contains("amberlog_disk_placement_differs{vm=\"x\",disk=\"d\"} 1\n")
        };
        assert!(differs(json!("it was changed from retain while the guest runs")) && !differs(Value::Null));
    }

    #[test]
    fn the_older_format_names_counters_whole() {
        let text = render(&status(), Format::Plain);
        assert!(text.contains("# TYPE amberlog_disk_requests_total counter\n"), "{text}");
        assert!(!text.contains("# EOF") && !text.contains("# UNIT"), "{text}");
    }

    #[test]
    fn what_durable_within_asks_for_is_held_against_what_is_in_force() {
        let written = |asked: Value, within: Value, unmet_for: Value| {
            let mut disk = json!({"name": "d", "durable_within_wished_s": asked, "durable_within_unmet_for_s": unmet_for,
                "durability": {"within_s": within, "oldest_undurable_s": null}});
            if unmet_for == "unknown" {
                disk.as_object_mut().expect("an object").remove("durable_within_unmet_for_s");
            }
            let text = render(&json!({"vms": [{"vm": "x", "disks": [disk]}]}), Format::OpenMetrics);
            let samples = text.lines().filter_map(|line| line.strip_prefix("amberlog_disk_durable_within_"));
            samples.map(|sample| sample.replace("{vm=\"x\",disk=\"d\"}", "")).collect::<Vec<_>>()
        };
        assert_eq!(written(json!(5), json!(5), Value::Null), ["unmet 0", "seconds 5", "wished_seconds 5"]);
        assert_eq!(written(json!(0), json!(5), json!(0)), ["unmet 1", "seconds 5", "wished_seconds 0"]);
        assert_eq!(written(json!(5), Value::Null, json!(9)), ["unmet 1", "wished_seconds 5"]);
        assert_eq!(written(Value::Null, Value::Null, Value::Null), [""; 0]);
        assert_eq!(written(json!(5), Value::Null, json!("unknown")), ["wished_seconds 5"]);
    }

    /// What the dashboard and the alert rules ask for is there.
    #[test]
    fn the_dashboard_and_the_rules_name_what_there_is() {
        let mut known: Vec<String> = OF_DISKS
            .iter()
            .map(|(name, ..)| *name)
            .chain(HISTOGRAMS.iter().map(|(name, ..)| *name))
            .chain(OF_MEMORY.iter().map(|(name, ..)| *name))
            .chain(OF_AREAS.iter().map(|(name, ..)| *name))
            .map(str::to_owned)
            .collect();
        let source = include_str!("text.rs");
        known.extend(
            source
                .lines()
                .filter_map(|line| line.trim().strip_prefix("output.begin(\"")?.split('"').next().map(str::to_owned)),
        );
        known.push("disk_placement_info".to_owned());
        for file in ["prometheus/amberlog.rules.yml", "prometheus/amberlog.test.yml", "grafana/amberlog.json"] {
            let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging").join(file);
            let text = std::fs::read_to_string(path).expect(file);
            let mut asked = 0;
            for (at, _) in text.match_indices("amberlog_") {
                let word: String = text[at..].chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
                let name = word.trim_start_matches("amberlog_");
                let name = ["_total", "_bucket", "_count", "_sum"]
                    .iter()
                    .find_map(|end| name.strip_suffix(end))
                    .unwrap_or(name);
                assert!(known.iter().any(|known| known == name), "{file} asks for {word}, which there is not");
                asked += 1;
            }
            assert!(asked > 5, "{file}");
        }
        let page = include_str!("../../../../docs/metrics.md");
        for name in &known {
            let is_listed = ["", "_total"].iter().any(|end| page.contains(&format!("| `amberlog_{name}{end}` |")));
            assert!(is_listed, "docs/metrics.md does not list amberlog_{name}");
        }
        let dashboard = include_str!("../../../../packaging/grafana/amberlog.json");
        let dashboard: Value = serde_json::from_str(dashboard).expect("the dashboard is JSON");
        assert!(dashboard["panels"].as_array().is_some_and(|panels| panels.len() > 10));
    }

    #[test]
    fn a_state_that_is_new_is_shown_all_the_same() {
        let text = render(&json!({"vms": [{"vm": "x", "state": "moving"}]}), Format::Plain);
        assert!(text.contains("amberlog_vm_state{vm=\"x\",state=\"moving\"} 1\n"), "{text}");
    }
}
