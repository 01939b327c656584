//! `amberlog-journal-server`, which `amberlog journal-server` starts: run the server of remote journals, or look at what one
//! keeps.
//!
//! What it must never do: touch a disk of a VM. Failure story: the crate `remote-journal` has it.

#![forbid(unsafe_code)]
// What an option's help says in brackets is optional, and no link.
#![allow(rustdoc::broken_intra_doc_links)]

use clap::{Args, CommandFactory, Parser, Subcommand};
use command_line::documents::DocumentsArgs;
use command_line::exit;
use command_line::print_line;
use command_line::remote_options::{RemoteName, RemoteTrust};
use recovery::uuid_text;
use remote_journal::jetstream::{JetStream, NatsAddress, NatsOptions};
use remote_journal::message::JournalStatus;
use remote_journal::store::{Store, StoreError, StoreOptions};
use remote_journal::{BlockingClient, Server, ServerOptions};
use serde_json::{Value, json};
use std::io::ErrorKind;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Run the server of remote journals, or list, inspect and delete what one keeps.
#[derive(Parser, Debug)]
#[command(name = "amberlog-journal-server", version, args_conflicts_with_subcommands = true)]
struct JournalServerArgs {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    serve: Option<ServeArgs>,
}

#[derive(Args, Debug)]
struct ServeArgs {
    /// ADDRESS:PORT to listen on; port 0 takes a free one, which is printed.
    #[arg(long, value_name = "ADDR")]
    listen: String,
    /// The store: a directory, made if there is none; or a stream of NATS JetStream, made with its replicas if there is
    /// none: nats://[USER:PASSWORD@]HOST:PORT[,HOST:PORT]...[/STREAM], or tls:// for TLS to the NATS servers. STREAM is
    /// AMBERLOG if not given.
    #[arg(long, value_name = "DIR|URL")]
    store: PathBuf,
    /// Replicas that a stream has to have.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=5))]
    replicas: u8,
    /// Credentials file for the NATS servers (a user's JWT and seed).
    #[arg(long, value_name = "FILE")]
    nats_credentials: Option<PathBuf>,
    /// Authority of the NATS servers' certificates (PEM); asks for TLS.
    #[arg(long, value_name = "FILE")]
    nats_ca: Option<PathBuf>,
    /// Our certificate for the NATS servers (PEM); asks for TLS.
    #[arg(long, value_name = "FILE", requires = "nats_key")]
    nats_cert: Option<PathBuf>,
    /// Its private key (PEM).
    #[arg(long, value_name = "FILE", requires = "nats_cert")]
    nats_key: Option<PathBuf>,
    /// The server's certificate (PEM).
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Its private key (PEM).
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Clients may prove who they are by a certificate of this authority (PEM); they then need one.
    #[arg(long, value_name = "FILE")]
    client_ca: Option<PathBuf>,
    /// Clients may prove who they are by a secret: file with lines IDENTITY SECRET.
    #[arg(long, value_name = "FILE")]
    secrets: Option<PathBuf>,
    /// Neither TLS nor proof of who clients are, unless the above ask for it.
    #[arg(long)]
    insecure: bool,
    /// ADDRESS:PORT for Prometheus.
    #[arg(long, value_name = "ADDR")]
    metrics: Option<String>,
    /// Bytes of a segment, in MiB.
    #[arg(long, value_name = "MIB", default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..=4095))]
    segment_size: u64,
    /// Bound on the store, in MiB.
    #[arg(long, value_name = "MIB", default_value_t = 65536)]
    space: u64,
    /// Bound on what one journal keeps, in MiB.
    #[arg(long, value_name = "MIB", default_value_t = 2048)]
    journal_space: u64,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// List the client's journals.
    List(AskArgs),
    /// Show one journal: --remote HOST:PORT/NAME.
    Inspect(AskArgs),
    /// Remove a journal: --remote HOST:PORT/NAME.
    Delete {
        #[command(flatten)]
        ask: AskArgs,
        /// Even if it holds a live log that may be needed for recovery.
        #[arg(long)]
        force: bool,
    },
    /// Write manual pages and completions into a directory: for packages.
    #[command(hide = true)]
    Documents(DocumentsArgs),
}

#[derive(Args, Debug)]
struct AskArgs {
    /// The server, and the journal.
    #[arg(long, value_name = "HOST:PORT[/NAME]")]
    remote: RemoteName,
    #[command(flatten)]
    trust: RemoteTrust,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    let args = JournalServerArgs::parse();
    command_line::logging::start();
    let result = match (args.command, args.serve) {
        (Some(Command::Documents(args)), _) => args.write(JournalServerArgs::command(), &[]).map_err(Into::into),
        (Some(Command::List(args)), _) => list(&args),
        (Some(Command::Inspect(args)), _) => inspect(&args),
        (Some(Command::Delete { ask, force }), _) => delete(&ask, force),
        (None, Some(serve)) => serve_until_told(serve),
        (None, None) => Err(exit::usage("journal-server needs --listen and --store, or one of list, inspect, delete")),
    };
    command_line::output::code_after(match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // What was asked for cannot be, whatever there is.
            let is_usage =
                error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == ErrorKind::InvalidInput);
            let code = if is_usage { exit::USAGE } else { exit::code_of(&error) };
            exit::report("amberlog journal-server", &error, code)
        }
    })
}

fn serve_until_told(args: ServeArgs) -> anyhow::Result<()> {
    own_files::keep_files_private();
    let mut signals = signal_hook::iterator::Signals::new([signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT])?;
    let options = ServerOptions {
        bounds: StoreOptions {
            segment_bytes: args.segment_size << 20,
            space_bytes_max: args.space << 20,
            journal_bytes_max: args.journal_space << 20,
        },
        certificate: args.tls_cert.zip(args.tls_key),
        client_ca: args.client_ca,
        secrets: args.secrets,
        insecure: args.insecure,
        metrics: args.metrics,
        ..ServerOptions::new(args.listen, args.store)
    };
    let url = options.store.to_str().filter(|store| NatsAddress::is_one(store)).map(str::to_owned);
    let server = match url {
        None => Server::start(options)?,
        Some(url) => {
            let address: NatsAddress = url.parse().map_err(|error| exit::usage(format!("--store {url}: {error}")))?;
            let mut stream = NatsOptions {
                replicas: args.replicas.into(),
                credentials: args.nats_credentials,
                ca: args.nats_ca,
                certificate: args.nats_cert.zip(args.nats_key),
                ..NatsOptions::new(address, options.bounds.space_bytes_max)
            };
            let id = u32::from_le_bytes(remote_journal::random());
            let bounds = options.bounds;
            Server::with_store_opened_by(options, move || {
                let opened = JetStream::open(stream.clone());
                // The next time there are clients that wait.
                stream.patience = Duration::from_secs(10);
                Store::open(opened.map_err(|error| StoreError::Failed(error.to_string()))?, bounds, id)
            })?
        }
    };
    print_line!("listening on {}", server.address());
    if let Some(address) = server.metrics_address() {
        print_line!("metrics on http://{address}/metrics");
    }
    if let Some(signal) = signals.forever().next() {
        log::info!("signal {signal}: stopping");
    }
    server.stop();
    Ok(())
}

impl AskArgs {
    fn connect(&self) -> anyhow::Result<BlockingClient> {
        Ok(BlockingClient::connect(&self.trust.client(&self.remote.address))?)
    }

    fn name(&self) -> anyhow::Result<String> {
        self.remote.name.clone().ok_or_else(|| exit::usage("which journal? --remote HOST:PORT/NAME"))
    }
}

fn list(ask: &AskArgs) -> anyhow::Result<()> {
    let journals = ask.connect()?.list()?;
    if ask.json {
        print_line!("{}", json!({"schema": 1, "journals": journals.iter().map(value).collect::<Vec<_>>()}));
    } else if journals.is_empty() {
        print_line!("no journals");
    } else {
        journals.iter().for_each(print);
    }
    Ok(())
}

fn inspect(ask: &AskArgs) -> anyhow::Result<()> {
    let mut client = ask.connect()?;
    let name = ask.name()?;
    let status = client.status(&name)?.ok_or_else(|| anyhow::anyhow!("there is no journal {name}"))?;
    // Reads all of it, so that what is shown as whole is whole.
    let damage =
        if status.is_live { client.fetch(&status, u32::MAX).err().map(|error| error.to_string()) } else { None };
    if ask.json {
        let mut object = value(&status);
        object["schema"] = json!(1);
        object["damage"] = json!(damage);
        print_line!("{object}");
    } else {
        print(&status);
        print_line!("  owner {}, block size {}", uuid_text(&status.owner), status.block_bytes);
        print_line!("  batches {} to {}, highest epoch given out {}", status.tail, status.last, status.fence);
    }
    match damage {
        Some(damage) => Err(exit::refused(damage)),
        None => Ok(()),
    }
}

fn delete(ask: &AskArgs, force: bool) -> anyhow::Result<()> {
    let mut client = ask.connect()?;
    let name = ask.name()?;
    client.delete(&name, force)?;
    print_line!("{name} is deleted");
    Ok(())
}

fn value(status: &JournalStatus) -> Value {
    json!({
        "name": status.name,
        "owner": uuid_text(&status.owner),
        "epoch": status.epoch,
        "fence": status.fence,
        "live": status.is_live,
        "recovered": status.is_recovered,
        "block_size": status.block_bytes,
        "tail": status.tail,
        "last": status.last,
        "batches": status.batches,
        "bytes": status.bytes,
    })
}

fn print(status: &JournalStatus) {
    print_line!(
        "{}: epoch {}, {}, {} batches, {} bytes",
        status.name,
        status.epoch,
        match (status.is_live, status.is_recovered) {
            (true, true) => "recovered, and kept until the next log begins",
            (true, false) => "live",
            (false, _) => "over",
        },
        status.batches,
        status.bytes
    );
}
