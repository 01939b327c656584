//! `amberlog libvirt`: a domain's XML that works with a daemon's disks, and the hook with which `virsh start` says why it would not.
//!
//! The daemon is asked what it serves; libvirt is asked through `virsh`, and only by `define`. Must never: change a domain that could
//! not be changed whole. Failure story: everything is looked at before `virsh define`, which itself takes a document whole or not.

mod apparmor;
mod domain;
mod hook;
mod xml;

use crate::client::Daemon;
use crate::exit;
use anyhow::{Context, bail, ensure};
use clap::{Args, Subcommand};
use command_line::output::text as print;
use domain::{BackEnd, BackEndDisk};
use serde_json::{Value, json};
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use xml::Element;

/// Arguments of `amberlog libvirt`.
#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct LibvirtArgs {
    #[command(subcommand)]
    command: Option<LibvirtCommand>,
    /// Print the XML of this VM, by the name that it has in the daemon's configuration.
    vm: Option<String>,
    /// A domain's XML (virsh dumpxml --inactive), - for stdin; without, a small domain is made.
    #[arg(long, value_name = "FILE")]
    xml: Option<PathBuf>,
    /// Let the domain keep all of its disks, and have the VM's besides.
    #[arg(long)]
    add_disks: bool,
    #[command(flatten)]
    daemon: Daemon,
}

#[derive(Subcommand, Debug)]
enum LibvirtCommand {
    /// Change a domain so that the daemon serves its disks: virsh dumpxml, edit, virsh define. It takes effect with its next start.
    Define(DefineArgs),
    /// Called by libvirt (/etc/libvirt/hooks/qemu.d/amberlog): looks whether a domain could reach its disks, before QEMU is started.
    Hook(hook::HookArgs),
}

#[derive(Args, Debug)]
struct DefineArgs {
    /// The domain.
    #[arg(long, value_name = "NAME")]
    domain: String,
    /// The VM in the daemon's configuration, if it has another name than the domain.
    #[arg(long, value_name = "VM")]
    vm: Option<String>,
    /// libvirt's address.
    #[arg(long, value_name = "URI", default_value = "qemu:///system")]
    connect: String,
    /// Print the XML, and change nothing.
    #[arg(long)]
    dry_run: bool,
    /// Let the domain keep all of its disks, and have the VM's besides.
    #[arg(long)]
    add_disks: bool,
    #[command(flatten)]
    daemon: Daemon,
}

/// Runs the command.
pub fn run(args: &LibvirtArgs) -> ExitCode {
    let result = match (&args.command, &args.vm) {
        (Some(LibvirtCommand::Define(args)), _) => define(args),
        (Some(LibvirtCommand::Hook(args)), _) => hook::run(args),
        (None, Some(vm)) => show(args, vm),
        (None, None) => Err(exit::usage("libvirt needs a VM, or one of define and hook".to_owned())),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => exit::report(&error),
    }
}

/// What the daemon serves for a VM.
fn back_end(daemon: &Daemon, vm: &str, adds_disks: bool) -> anyhow::Result<BackEnd> {
    let status = daemon.ask_quickly(&json!({"command": "status", "vm": vm}))?;
    let entry = &status["vms"][0];
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let state = text(&entry["state_text"]).unwrap_or_default();
    ensure!(entry["sockets"].is_array(), "vm {vm} is not served: {state}");
    // What the daemon says of itself; the entry above is what the VM's worker says.
    let needed =
        daemon.ask_quickly(&json!({"command": "arguments", "vm": vm, "memory_mib": 1024, "reconnect": true}))?;
    let mut disks = Vec::new();
    for disk in needed["disks"].as_array().into_iter().flatten() {
        let (Some(socket), Some(image)) = (text(&disk["socket"]), text(&disk["image"])) else {
            bail!("the daemon does not name vm {vm}'s images")
        };
        disks.push(BackEndDisk { image: image.into(), socket: socket.into(), is_read_only: disk["readonly"] == true });
    }
    ensure!(!disks.is_empty(), "vm {vm} has no disks");
    let environment = needed["environment"].as_object().into_iter().flatten();
    let environment = environment.filter_map(|(name, value)| Some((name.clone(), text(value)?))).collect();
    let memory_file = disks[0].socket.with_file_name("area").join("ram");
    Ok(BackEnd { disks, memory_file, environment, adds_disks })
}

/// Edits a document. What is to be known goes to stderr.
fn edited(document: &str, back_end: &BackEnd) -> anyhow::Result<String> {
    let refuse = |sentence: String| exit::refused(format!("{sentence}; nothing was changed"));
    let mut domain = xml::parse(document).map_err(refuse)?;
    for note in domain::edit(&mut domain, back_end).map_err(refuse)? {
        crate::exit::say("amberlog", format_args!("{note}"));
    }
    Ok(domain.to_text())
}

fn show(args: &LibvirtArgs, vm: &str) -> anyhow::Result<()> {
    let back_end = back_end(&args.daemon, vm, args.add_disks)?;
    let document = match &args.xml {
        None => {
            eprintln!(
                "amberlog: a domain with 1 GiB of memory, one processor, and no network; --xml FILE edits one that there is, 'amberlog \
                 libvirt define' does so in place"
            );
            smallest_domain(vm)
        }
        Some(path) if path.as_os_str() == "-" => std::io::read_to_string(std::io::stdin()).context("reading stdin")?,
        Some(path) => std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?,
    };
    Ok(print(&edited(&document, &back_end)?)?)
}

/// What a domain has to have so that libvirt takes it, and nothing of what only its owner knows.
fn smallest_domain(name: &str) -> String {
    let kind = if std::path::Path::new("/dev/kvm").exists() { "kvm" } else { "qemu" };
    Element::new("domain", &[("type", kind)])
        .with(Element::new("name", &[]).with_text(name))
        .with(Element::new("memory", &[("unit", "KiB")]).with_text("1048576"))
        .with(Element::new("vcpu", &[]).with_text("1"))
        .with(Element::new("os", &[]).with(Element::new("type", &[]).with_text("hvm")))
        .with(Element::new("features", &[]).with(Element::new("acpi", &[])))
        .to_text()
}

fn define(args: &DefineArgs) -> anyhow::Result<()> {
    let back_end = back_end(&args.daemon, args.vm.as_ref().unwrap_or(&args.domain), args.add_disks)?;
    let document = virsh(&args.connect, &["dumpxml", "--inactive", "--security-info", &args.domain], None)?;
    let document = edited(&document, &back_end)?;
    if args.dry_run {
        return Ok(print(&document)?);
    }
    let said = virsh(&args.connect, &["define", "--validate", "/dev/stdin"], Some(&document))?;
    Ok(print(&format!("{}\nwith its next start amberlog serves its disks\n", said.trim()))?)
}

/// Runs virsh; gives what it prints.
fn virsh(connect: &str, words: &[&str], input: Option<&str>) -> anyhow::Result<String> {
    let mut child = Command::new("virsh")
        .args(["--quiet", "--connect", connect])
        .args(words)
        .stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() })
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("starting virsh (is the package libvirt-clients installed?)")?;
    if let (Some(mut pipe), Some(input)) = (child.stdin.take(), input) {
        pipe.write_all(input.as_bytes()).context("writing to virsh")?;
    }
    let output = child.wait_with_output().context("waiting for virsh")?;
    ensure!(
        output.status.success(),
        "virsh {} says: {}",
        words[0],
        String::from_utf8_lossy(&output.stderr).trim().trim_start_matches("error: ")
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
