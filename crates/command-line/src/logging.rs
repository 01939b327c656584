//! Log lines on stderr; `AMBERLOG_LOG` says which, in the syntax of `tracing_subscriber::EnvFilter` (default `info`).

/// Has log lines printed from here on.
pub fn start() {
    crate::exit::when_nobody_reads();
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_env("AMBERLOG_LOG")
                .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info")),
        )
        .with_target(false)
        .init();
}
