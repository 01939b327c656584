//! Fields of results in words, and numbers as people read them.

/// A field in words, and its unit.
pub fn field_words(field: &str) -> (&'static str, &'static str) {
    match field {
        "seconds" => ("time until everything is synchronised", "s"),
        "seconds_unsynced" => ("time by the load's own clock", "s"),
        "seconds_unmounted" => ("time until everything is home", "s"),
        "bytes_to_storage" => ("bytes to storage", "bytes"),
        "recovery_model_seconds" => ("recovery time on the modelled disk", "s"),
        "recovery_bytes" => ("bytes moved by recovery", "bytes"),
        "area_bytes_max" => ("the journal area's tables", "bytes"),
        "pool_bytes_max" | "pool_bytes" => ("copied blocks (copy-on-write)", "bytes"),
        "tuple_bytes_max" | "tuple_bytes" => ("tuples in use, 18 bytes a held block", "bytes"),
        "cpu_seconds" => ("processor time of guest and amberlog", "s"),
        "guest_cpu_seconds" => ("processor time in the guest", "s"),
        "amberlog_cpu_seconds" => ("processor time of amberlog", "s"),
        "server_cpu_seconds" => ("processor time of the journal server", "s"),
        "vm_cpu" => ("processor of the VM and its amberlog", "%"),
        "server_cpu" => ("processor of the journal server", "%"),
        "host_cpu" => ("processors of the host", "%"),
        "protection_percent" => ("share of the time in protection and unprotection", "%"),
        "fault_wait_percent" => ("share of the time in which writers waited at protected pages", "%"),
        "network_percent" => ("share of a gigabit network", "%"),
        "remote_wire_bytes" => ("bytes over the network", "bytes"),
        "flushes_to_storage" => ("flushes that reach storage", ""),
        "transactions" => ("transactions committed", ""),
        "protect_us" => ("protection of a page", "µs"),
        "erases" => ("blocks erased", ""),
        "gc_time_us" => ("garbage collection", "µs"),
        "requests" => ("requests", ""),
        "delete_seconds" => ("time of the deletion itself", "s"),
        "protect_calls" => ("calls that protect pages", ""),
        "cow_faults" => ("copy-on-write faults", ""),
        "pages_copied" => ("pages copied at a commit", ""),
        "pages_protected" => ("pages retained in the guest's memory", ""),
        "amberlog_code_kb" => ("code of the amberlog command", "KB"),
        "vmm_shim_code_kb" => ("code of the library in the VMM", "KB"),
        "lines" => ("lines of code that hold and recover journals", ""),
        "layout_score" => ("layout score of the disk", ""),
        "corrupted_runs" => ("runs with corrupted records", "%"),
        "corrupted_runs_not_by_commit" => ("runs with other corrupted records than one that a commit cut in two", "%"),
        "inconsistent_runs" => ("runs with a damaged file system", "%"),
        "fsync_p50_us" => ("fsync, median", "µs"),
        "fsync_p99_us" => ("fsync, 99th percentile", "µs"),
        "fsync_p999_us" => ("fsync, 99.9th percentile", "µs"),
        "journal_write_bytes" => ("bytes written to the journal, wherever it is", "bytes"),
        "nvm_bytes_absorbed" => ("bytes of the guest's checkpoints that were absorbed", "bytes"),
        "transaction_p50_us" => ("transaction, median", "µs"),
        "transaction_p99_us" => ("transaction, 99th percentile", "µs"),
        "transactions_per_second" => ("transactions a second", "1/s"),
        "flows_per_second" => ("flows a second", "1/s"),
        "drive_busy_percent" => ("the drive's share of the time", "%"),
        "guest_cpu_percent" => ("the guest's processor's share of the time", "%"),
        "host_cpu_percent" => ("all guests' and amberlog's share of the host's processors", "%"),
        "flushing_percent" => ("share of the time in which the drive was asked to flush", "%"),
        _ => ("another field", ""),
    }
}

/// Whether a field is a time, which a quick run is too short to say anything of.
pub fn is_time(field: &str) -> bool {
    // Garbage collection and recovery are a simulator's sums, whatever the machine.
    let is_simulated = field == "gc_time_us" || field == "recovery_model_seconds";
    !is_simulated && (field.contains("seconds") || field.ends_with("_per_second") || field.ends_with("_us"))
}

/// Whether a field is how long a load took, by one of the clocks that there are.
pub fn is_load_time(field: &str) -> bool {
    field.starts_with("seconds") || field == "delete_seconds"
}

/// Whether a field is the share of runs in which something happened: each value is 0 or 1.
pub fn is_proportion(field: &str) -> bool {
    matches!(field, "corrupted_runs" | "corrupted_runs_not_by_commit" | "inconsistent_runs")
}

/// Whether a field is counted in what we built: it strays nowhere, and counting again tells nothing new.
pub fn is_counted(field: &str) -> bool {
    matches!(field, "lines" | "amberlog_code_kb" | "vmm_shim_code_kb")
}

/// Whether a field goes by the sizes of a load and by clocks beside it: times, bytes, counts of a run. What is not of a load's
/// length (the share of damaged runs, what a page's protection takes, sizes of code) is at any scale what it is.
pub fn goes_by_scale(field: &str) -> bool {
    !is_proportion(field) && !is_counted(field) && field != "protect_us"
}

/// Whether a field is the most memory that something took, which grows with the sizes of a load.
pub fn is_most_memory(field: &str) -> bool {
    field.ends_with("_bytes_max")
}

/// A number as people read it.
pub fn grouped(value: f64) -> String {
    if value.abs() < 1000.0 {
        let text = format!("{value:.2}");
        let text = text.trim_end_matches('0').trim_end_matches('.');
        return if text == "-0" { "0".to_owned() } else { text.to_owned() };
    }
    let digits = format!("{:.0}", value.abs());
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    if value < 0.0 { format!("-{text}") } else { text }
}

/// A field's value with its unit: `10.8 MB`, `14.2 µs`, `63 %`.
pub fn amount(field: &str, value: f64) -> String {
    if is_proportion(field) {
        return format!("{:.0} %", 100.0 * value);
    }
    match field_words(field).1 {
        "bytes" if value >= 1e9 => format!("{:.1} GB", value / 1e9),
        "bytes" if value >= 1e6 => format!("{:.1} MB", value / 1e6),
        "bytes" if value >= 1e3 => format!("{:.0} kB", value / 1e3),
        unit => format!("{} {unit}", grouped(value)).trim_end().to_owned(),
    }
}

/// A percentage less as a change with its sign, as papers print it: less is negative.
pub fn change(percent_less: f64, digits: usize) -> String {
    let text = format!("{:.digits$}", percent_less.abs());
    let is_zero = text.bytes().all(|byte| byte == b'0' || byte == b'.');
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    let sign = if is_zero {
        ""
    } else if percent_less > 0.0 {
        "−"
    } else {
        "+"
    };
    format!("{sign}{text} %")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_as_people_read_them() {
        assert_eq!(
            (grouped(1_234_567.0), grouped(50.90), grouped(-0.001)),
            ("1,234,567".into(), "50.9".into(), "0".into())
        );
        assert_eq!(
            (change(50.9, 1), change(-7.0, 1), change(0.04, 1)),
            ("−50.9 %".into(), "+7 %".into(), "0 %".into())
        );
        assert_eq!(amount("pool_bytes_max", 10_800_332.0), "10.8 MB");
        assert_eq!(amount("corrupted_runs", 0.635), "64 %");
        assert!(is_time("seconds_unmounted") && !is_time("gc_time_us") && !is_time("bytes_to_storage"));
    }
}
