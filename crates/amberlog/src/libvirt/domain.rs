//! A libvirt domain whose disks amberlog serves: what has to change in its XML, and why.
//!
//! Everything that is not about disks, memory or the balloon stays. Made again from its own result it changes nothing. Must never:
//! take away a disk that amberlog does not serve. Failure story: a domain that cannot be changed so is left alone, with a sentence.

use super::xml::{Element, Node};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

const QEMU_NAMESPACE: &str = "http://libvirt.org/schemas/domain/qemu/1.0";
/// How our memory is called on QEMU's command line.
const MEMORY_ID: &str = "amberlog-memory";

/// One disk, as the daemon has it.
#[derive(Clone, Debug)]
pub struct BackEndDisk {
    /// Its image.
    pub image: PathBuf,
    /// Where a VMM finds it.
    pub socket: PathBuf,
    /// Its guest may only read it.
    pub is_read_only: bool,
}

/// What the daemon serves for a VM.
#[derive(Clone, Debug)]
pub struct BackEnd {
    /// Its disks, in order.
    pub disks: Vec<BackEndDisk>,
    /// The file in which the guest's memory is to be, so that it can be protected.
    pub memory_file: PathBuf,
    /// Variables for QEMU.
    pub environment: Vec<(String, String)>,
    /// The domain may keep all of its disks, and have these besides.
    pub adds_disks: bool,
}

/// Whether both are the same file, by whatever names.
fn is_same(one: &Path, other: &Path) -> bool {
    let canonical = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    one == other || canonical(one) == canonical(other)
}

/// The image or device of a disk element.
fn source(disk: &Element) -> Option<PathBuf> {
    let source = disk.find("source")?;
    ["file", "dev"].iter().find_map(|name| source.get(name)).map(PathBuf::from)
}

/// The socket of a vhostuser disk.
pub fn socket(disk: &Element) -> Option<PathBuf> {
    (disk.get("type").as_deref() == Some("vhostuser")).then(|| disk.find("source")?.get("path").map(PathBuf::from))?
}

/// A guest's memory, in bytes.
///
/// # Errors
/// When it is not said, or in no unit that libvirt knows.
pub fn memory_bytes(domain: &Element) -> Result<u64, String> {
    let memory = domain.find("memory").ok_or("the domain does not say how much memory it has")?;
    let unit = memory.get("unit").unwrap_or_else(|| "KiB".to_owned());
    let factor: u64 = match unit.as_str() {
        "b" | "bytes" => 1,
        "KB" => 1000,
        "k" | "KiB" => 1 << 10,
        "MB" => 1_000_000,
        "M" | "MiB" => 1 << 20,
        "GB" => 1_000_000_000,
        "G" | "GiB" => 1 << 30,
        "TB" => 1_000_000_000_000,
        "T" | "TiB" => 1 << 40,
        other => return Err(format!("the domain's memory has the unit {other}, which is not known")),
    };
    let number: u64 = memory.text().parse().map_err(|_| format!("the domain's memory is '{}'", memory.text()))?;
    // libvirt has whole KiB.
    Ok(number.saturating_mul(factor).next_multiple_of(1 << 10))
}

/// Changes a domain so that amberlog serves its disks. Gives what was changed and what is to be known, a sentence each.
///
/// # Errors
/// Why it cannot be.
pub fn edit(domain: &mut Element, back_end: &BackEnd) -> Result<Vec<String>, String> {
    if domain.name != "domain" {
        return Err(format!("this is a {}, and not a domain", domain.name));
    }
    let mut notes = Vec::new();
    let bytes = memory_bytes(domain)?;
    let reason = why_memory_stays(domain);
    disks(domain, back_end, &mut notes)?;
    share_memory(domain);
    let devices = domain.find_or_add("devices");
    if devices.elements().any(|device| device.name == "memballoon" && device.get("model").as_deref() != Some("none")) {
        notes.push(
            "the balloon is taken out: it takes pages away without a fault, and everything would be copied".to_owned(),
        );
    }
    devices.remove(|device| device.name == "memballoon");
    devices.children.push(Node::Element(Element::new("memballoon", &[("model", "none")])));
    if devices.elements().any(|device| device.name == "hostdev") {
        notes.push(
            "a device of the host is passed through; it writes to memory without a fault, so journals will be copied"
                .to_owned(),
        );
    }
    match &reason {
        Some(reason) => {
            notes.push(format!("the guest's memory stays where libvirt has it, and journals will be copied: {reason}"))
        }
        None => notes.push(format!(
            "the guest's memory is in {}, where its pages can be protected",
            back_end.memory_file.display()
        )),
    }
    command_line(domain, back_end, reason.is_none().then_some(bytes));
    Ok(notes)
}

/// Why the memory cannot be in our file, if so: libvirt makes it of several parts, or elsewhere for a reason of its own.
fn why_memory_stays(domain: &Element) -> Option<String> {
    let has_cells = domain.find("cpu").and_then(|cpu| cpu.find("numa")).is_some();
    let backing = domain.find("memoryBacking");
    let has = |name: &str| backing.is_some_and(|backing| backing.find(name).is_some());
    if has_cells {
        Some("the guest has NUMA cells, each with memory of its own".to_owned())
    } else if domain.find("maxMemory").is_some() {
        Some("memory can be plugged in (maxMemory)".to_owned())
    } else if has("hugepages") {
        Some("it is in huge pages".to_owned())
    } else {
        None
    }
}

/// The guest's disks become amberlog's, each in the place of the one that had its image.
fn disks(domain: &mut Element, back_end: &BackEnd, notes: &mut Vec<String>) -> Result<(), String> {
    let devices = domain.find_or_add("devices");
    let mut targets: BTreeSet<String> = BTreeSet::new();
    for device in devices.elements().filter(|device| device.name == "disk") {
        targets.extend(device.find("target").and_then(|target| target.get("dev")));
    }
    let mut missing: Vec<&BackEndDisk> = back_end.disks.iter().collect();
    for device in devices.elements_mut().filter(|device| device.name == "disk") {
        let is_it = |disk: &&&BackEndDisk| match (socket(device), source(device)) {
            (Some(socket), _) => is_same(&socket, &disk.socket),
            (None, Some(image)) => is_same(&image, &disk.image),
            (None, None) => false,
        };
        let Some(disk) = missing.iter().find(is_it).copied() else { continue };
        missing.retain(|other| !std::ptr::eq(*other, disk));
        take_over(device, disk, &mut targets, notes)?;
    }
    let is_none_taken = missing.len() == back_end.disks.len();
    let is_kept = |device: &&Element| {
        device.name == "disk" && !matches!(device.get("device").as_deref(), Some("cdrom" | "floppy"))
    };
    if let (true, false, Some(kept), Some(disk)) =
        (is_none_taken, back_end.adds_disks, devices.elements().find(is_kept), missing.first())
    {
        // Of an image that was converted both would be there, with the same UUIDs, and the guest takes one of them.
        let image = source(kept).map_or_else(|| "its own".to_owned(), |image| image.display().to_string());
        return Err(format!(
            "no disk of the domain has an image of this VM, and {image} would stay beside {}: if that is a copy of it (qemu-img convert), name \
             the copy in the domain first (virsh edit: its path, and type='raw'); if it is to be a further disk, say --add-disks",
            disk.image.display()
        ));
    }
    for disk in missing {
        let target = free_target(&mut targets);
        notes.push(format!("{} is a new disk, {target}", disk.image.display()));
        let mut device = Element::new("disk", &[]);
        device.children.push(Node::Element(Element::new("target", &[("dev", &target), ("bus", "virtio")])));
        take_over(&mut device, disk, &mut targets, &mut Vec::new())?;
        devices.children.push(Node::Element(device));
    }
    Ok(())
}

fn free_target(targets: &mut BTreeSet<String>) -> String {
    let name = ('a'..='z').map(|letter| format!("vd{letter}")).find(|name| !targets.contains(name));
    let name = name.unwrap_or_else(|| format!("vda{}", targets.len()));
    targets.insert(name.clone());
    name
}

/// Makes a disk element amberlog's.
fn take_over(
    device: &mut Element,
    disk: &BackEndDisk,
    targets: &mut BTreeSet<String>,
    notes: &mut Vec<String>,
) -> Result<(), String> {
    let image = disk.image.display();
    if device.find("encryption").is_some()
        || device.find("source").is_some_and(|source| source.find("encryption").is_some())
    {
        return Err(format!(
            "{image} is encrypted by QEMU (<encryption>), which amberlog does not do; encrypt in the guest"
        ));
    }
    let format = device.find("driver").and_then(|driver| driver.get("type")).unwrap_or_else(|| "raw".to_owned());
    if format != "raw" {
        return Err(format!(
            "{image} has the format {format}, and amberlog serves raw images: convert it (qemu-img convert -O raw)"
        ));
    }
    let has = |name: &str| device.find(name).is_some();
    if has("transient") {
        return Err(format!(
            "what the guest writes to {image} is to be thrown away when it ends (<transient/>), and amberlog would keep it: leave the disk \
             to QEMU, or take <transient/> out"
        ));
    }
    if (has("readonly") || device.get("device").as_deref() == Some("cdrom")) && !disk.is_read_only {
        return Err(format!(
            "the guest may only read {image} (<readonly/>, or a CD), and amberlog would let it write: write '{image},readonly' in amberlog's \
             configuration and reload it, or take <readonly/> out"
        ));
    }
    if has("shareable") && !disk.is_read_only {
        return Err(format!(
            "other domains may write to {image}, too (<shareable/>), and amberlog gives an image to one VM, or to several that only read it: \
             leave the disk to QEMU, take <shareable/> out, or write '{image},readonly' in amberlog's configuration and reload it"
        ));
    }
    if device.find("iotune").is_some() {
        notes.push(format!("{image}: <iotune> does not work on vhostuser disks and is taken out"));
    }
    let is_virtio = device.find("target").is_some_and(|target| target.get("bus").as_deref() == Some("virtio"));
    if !is_virtio {
        let name = free_target(targets);
        notes.push(format!(
            "{image} becomes a virtio disk, /dev/{name} in the guest: see that its fstab and boot loader go by UUID"
        ));
        device.remove(|child| ["target", "address"].contains(&child.name.as_str()));
        device.children.push(Node::Element(Element::new("target", &[("dev", &name), ("bus", "virtio")])));
    }
    device.set("type", "vhostuser");
    device.set("device", "disk");
    // What libvirt allows on a vhostuser disk; all else is QEMU's own, and QEMU does not see the image any more.
    device.remove(|child| !["target", "address", "alias", "boot"].contains(&child.name.as_str()));
    for name in ["snapshot", "model", "rawio", "sgio"] {
        device.unset(name);
    }
    let reconnect = Element::new("reconnect", &[("enabled", "yes"), ("timeout", "1")]);
    let source = Element::new("source", &[("type", "unix"), ("path", &disk.socket.to_string_lossy())]).with(reconnect);
    let driver = Element::new("driver", &[("name", "qemu"), ("type", "raw")]);
    device.children.insert(0, Node::Element(source));
    device.children.insert(0, Node::Element(driver));
    Ok(())
}

/// A back-end reads and writes the guest's memory.
fn share_memory(domain: &mut Element) {
    let backing = domain.find_or_add("memoryBacking");
    let is_file = backing.find("source").and_then(|source| source.get("type")).is_some_and(|kind| kind != "anonymous");
    if !is_file && backing.find("hugepages").is_none() {
        backing.find_or_add("source").set("type", "memfd");
    }
    backing.find_or_add("access").set("mode", "shared");
}

/// QEMU's environment and, with `memory`, the guest's memory in our file.
fn command_line(domain: &mut Element, back_end: &BackEnd, memory: Option<u64>) {
    domain.set("xmlns:qemu", QEMU_NAMESPACE);
    let line = domain.find_or_add("qemu:commandline");
    // What an earlier time has put there.
    let arguments: Vec<Element> = line.elements().filter(|word| word.name == "qemu:arg").cloned().collect();
    let value = |word: &Element| word.get("value").unwrap_or_default();
    let is_ours = |word: &str| {
        word.split(',').any(|part| part == format!("id={MEMORY_ID}") || part == format!("memory-backend={MEMORY_ID}"))
    };
    let mut kept = Vec::new();
    let mut words = arguments.iter().peekable();
    while let Some(word) = words.next() {
        if words
            .peek()
            .is_some_and(|next| ["-object", "-machine"].contains(&value(word).as_str()) && is_ours(&value(next)))
        {
            words.next();
            continue;
        }
        kept.push(word.clone());
    }
    let mut preloads: Vec<String> = Vec::new();
    for variable in line.elements().filter(|variable| variable.name == "qemu:env") {
        if variable.get("name").as_deref() == Some("LD_PRELOAD") {
            preloads.extend(variable.get("value").unwrap_or_default().split(':').map(str::to_owned));
        }
    }
    let names: Vec<&str> = back_end.environment.iter().map(|(name, _)| name.as_str()).collect();
    line.remove(|word| {
        word.name == "qemu:arg"
            || word
                .get("name")
                .is_some_and(|name| names.contains(&name.as_str()) || name == guest_memory::SHIM_SOCKET_VARIABLE)
    });
    let is_shim = |path: &String| Path::new(path).file_name().is_some_and(|name| name == crate::shim::FILE_NAME);
    for word in kept {
        line.children.push(Node::Element(word));
    }
    if let Some(bytes) = memory {
        let path = back_end.memory_file.to_string_lossy().replace(',', ",,");
        let object = format!("memory-backend-file,id={MEMORY_ID},size={bytes},share=on,mem-path={path}");
        for word in ["-object", &object, "-machine", &format!("memory-backend={MEMORY_ID}")] {
            line.children.push(Node::Element(Element::new("qemu:arg", &[("value", word)])));
        }
    }
    for (name, value) in &back_end.environment {
        let value = match name.as_str() {
            // Others' libraries stay, behind ours.
            "LD_PRELOAD" => {
                let others =
                    preloads.iter().filter(|path| !is_shim(path) && !path.is_empty() && *path != value).cloned();
                std::iter::once(value.clone()).chain(others).collect::<Vec<_>>().join(":")
            }
            _ => value.clone(),
        };
        line.children.push(Node::Element(Element::new("qemu:env", &[("name", name), ("value", &value)])));
    }
}

#[cfg(test)]
mod tests {
    use super::super::xml::parse;
    use super::*;

    /// As virt-install makes it, shortened.
    const DOMAIN: &str = "<domain type='kvm'>
      <name>web</name>
      <memory unit='GiB'>1</memory>
      <os><type arch='x86_64' machine='q35'>hvm</type></os>
      <devices>
        <disk type='file' device='disk'>
          <driver name='qemu' type='raw' cache='none' discard='unmap'/>
          <source file='/srv/root.img'/>
          <target dev='vda' bus='virtio'/>
          <boot order='1'/>
          <address type='pci' slot='0x04'/>
        </disk>
        <disk type='file' device='disk'>
          <driver name='qemu' type='qcow2'/>
          <source file='/srv/other.qcow2'/>
          <target dev='vdb' bus='virtio'/>
        </disk>
        <disk type='block' device='disk'>
          <source dev='/dev/vg/data'/>
          <target dev='sda' bus='sata'/>
          <address type='drive' unit='0'/>
          <serial>X</serial>
        </disk>
        <interface type='network'><source network='default'/></interface>
        <memballoon model='virtio'><address type='pci' slot='0x05'/></memballoon>
      </devices>
    </domain>";

    fn back_end() -> BackEnd {
        let disk = |image: &str, name: &str| BackEndDisk {
            image: image.into(),
            socket: format!("/run/amberlog/web/{name}.sock").into(),
            is_read_only: false,
        };
        BackEnd {
            disks: vec![disk("/srv/root.img", "disk0"), disk("/dev/vg/data", "disk1"), disk("/srv/new,1.img", "disk2")],
            memory_file: "/run/amberlog/web/area/ram".into(),
            environment: vec![
                ("LD_PRELOAD".to_owned(), "/usr/lib/amberlog/libamberlog_vmm_shim.so".to_owned()),
                ("AMBERLOG_SHIM_SOCKET".to_owned(), "/run/amberlog/web/shim.sock".to_owned()),
            ],
            adds_disks: false,
        }
    }

    fn arguments(domain: &Element) -> Vec<String> {
        let line = domain.find("qemu:commandline").expect("it has one");
        line.elements().filter(|word| word.name == "qemu:arg").filter_map(|word| word.get("value")).collect()
    }

    #[test]
    fn a_default_domain_becomes_one_that_works() {
        let mut domain = parse(DOMAIN).expect("it is XML");
        let notes = edit(&mut domain, &back_end()).expect("it can be");
        let devices = domain.find("devices").expect("devices");
        let disks: Vec<_> = devices.elements().filter(|device| device.name == "disk").collect();
        let sockets: Vec<_> = disks.iter().map(|disk| socket(disk)).collect();
        let of = |name: &str| Some(PathBuf::from(format!("/run/amberlog/web/{name}.sock")));
        assert_eq!(sockets, [of("disk0"), None, of("disk1"), of("disk2")], "others' disks stay");
        let root = disks[0].to_text();
        for part in
            ["<boot order='1'/>", "slot='0x04'", "<reconnect enabled='yes' timeout='1'/>", "dev='vda' bus='virtio'"]
        {
            assert!(root.contains(part), "{part}: {root}");
        }
        assert!(!root.contains("cache") && !root.contains("root.img"), "{root}");
        assert!(disks[1].to_text().contains("other.qcow2"));
        let data = disks[2].to_text();
        assert!(
            data.contains("dev='vdc' bus='virtio'") && !data.contains("sata") && !data.contains("type='drive'"),
            "{data}"
        );
        assert!(!data.contains("serial"), "{data}");
        assert!(disks[3].to_text().contains("dev='vdd'"));
        assert_eq!(
            domain.find("memoryBacking").expect("shared").to_text().split_whitespace().collect::<String>(),
            "<memoryBacking><sourcetype='memfd'/><accessmode='shared'/></memoryBacking>"
        );
        let balloons: Vec<_> =
            devices.elements().filter(|device| device.name == "memballoon").map(|b| b.get("model")).collect();
        assert_eq!(balloons, [Some("none".to_owned())]);
        assert_eq!(
            arguments(&domain),
            [
                "-object",
                "memory-backend-file,id=amberlog-memory,size=1073741824,share=on,mem-path=/run/amberlog/web/area/ram",
                "-machine",
                "memory-backend=amberlog-memory"
            ]
        );
        assert_eq!(notes.len(), 4, "{notes:?}");
        // Once more changes nothing.
        let once = domain.to_text();
        edit(&mut domain, &back_end()).expect("it can be");
        assert_eq!(domain.to_text(), once);
    }

    /// The images were converted, and the domain still names the others.
    #[test]
    fn no_disk_is_added_beside_what_may_be_the_same() {
        let text = DOMAIN.replace("/srv/root.img", "/srv/root.qcow2").replace("/dev/vg/data", "/dev/vg/other");
        let mut domain = parse(&text).expect("it is XML");
        let error = edit(&mut domain, &back_end()).expect_err("both would be there");
        assert!(error.contains("/srv/root.qcow2 would stay beside /srv/root.img"), "{error}");
        let mut domain = parse(&text).expect("it is XML");
        edit(&mut domain, &BackEnd { adds_disks: true, ..back_end() }).expect("it is wished");
        assert_eq!(domain.to_text().matches("type='vhostuser'").count(), 3);
    }

    #[test]
    fn what_was_on_the_command_line_stays() {
        let line = "<qemu:commandline><qemu:arg value='-global'/><qemu:arg value='x=y'/><qemu:env name='LD_PRELOAD' value='/o.so'/>\
                    <qemu:env name='OTHER' value='1'/></qemu:commandline></domain>";
        let mut domain = parse(&DOMAIN.replace("</domain>", line)).expect("it is XML");
        for _ in 0..2 {
            edit(&mut domain, &back_end()).expect("it can be");
            assert_eq!(arguments(&domain).len(), 6);
            assert_eq!(arguments(&domain)[..2], ["-global", "x=y"]);
            let text = domain.to_text();
            assert!(text.contains("value='/usr/lib/amberlog/libamberlog_vmm_shim.so:/o.so'"), "{text}");
            assert_eq!((text.matches("LD_PRELOAD").count(), text.matches("'OTHER'").count()), (1, 1), "{text}");
        }
    }

    #[test]
    fn memory_that_libvirt_needs_elsewhere_stays_there() {
        for (part, reason) in [
            ("<cpu><numa><cell id='0' memory='1'/></numa></cpu>", "NUMA cells"),
            ("<maxMemory slots='2' unit='GiB'>4</maxMemory>", "plugged in"),
            ("<memoryBacking><hugepages/></memoryBacking>", "huge pages"),
        ] {
            let mut domain = parse(&DOMAIN.replace("<os>", &format!("{part}<os>"))).expect("it is XML");
            let notes = edit(&mut domain, &back_end()).expect("it can be");
            assert!(notes.iter().any(|note| note.contains(reason) && note.contains("copied")), "{notes:?}");
            assert!(arguments(&domain).is_empty());
            assert!(domain.to_text().contains("<access mode='shared'/>"));
        }
    }

    #[test]
    fn what_a_guest_may_not_write_stays_so() {
        let changed = |part: &str, is_read_only: bool| {
            let text = match part {
                "cdrom" => DOMAIN.replacen("device='disk'", "device='cdrom'", 1),
                _ => DOMAIN.replacen("<boot order='1'/>", &format!("<boot order='1'/><{part}/>"), 1),
            };
            let mut domain = parse(&text).expect("it is XML");
            let mut back_end = back_end();
            back_end.disks[0].is_read_only = is_read_only;
            edit(&mut domain, &back_end).map(|_| domain.to_text())
        };
        for (part, sentence) in [
            ("readonly", "write '/srv/root.img,readonly'"),
            ("cdrom", "write '/srv/root.img,readonly'"),
            ("shareable", "other domains may write"),
            ("transient", "thrown away"),
        ] {
            let error = changed(part, false).expect_err(part);
            assert!(error.contains(sentence), "{error}");
        }
        for part in ["readonly", "cdrom", "shareable"] {
            let text = changed(part, true).expect(part);
            assert!(!text.contains(part) && text.contains("disk0.sock"), "{text}");
        }
        changed("transient", true).expect_err("it is not known that nothing is written elsewhere");
        // Of a disk that is QEMU's own nothing is asked.
        let others =
            DOMAIN.replacen("<source file='/srv/other.qcow2'/>", "<source file='/srv/other.qcow2'/><transient/>", 1);
        edit(&mut parse(&others).expect("it is XML"), &back_end()).expect("it can be");
    }

    #[test]
    fn what_cannot_be_is_refused() {
        for (from, to, expected) in [
            ("type='raw'", "type='qcow2'", "raw images"),
            ("<boot order='1'/>", "<encryption format='luks'/>", "encrypted"),
            ("<memory unit='GiB'>1</memory>", "", "how much memory"),
            ("'GiB'>1<", "'pages'>1<", "unit pages"),
        ] {
            let mut domain = parse(&DOMAIN.replacen(from, to, 1)).expect("it is XML");
            let error = edit(&mut domain, &back_end()).expect_err(expected);
            assert!(error.contains(expected), "{error}");
        }
    }
}
