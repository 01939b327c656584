//! Where a guest's memory is, by QEMU's arguments.
//!
//! amberlog adds memory of its own only where QEMU would make it itself. What the user has said of memory is used as it is, or
//! refused with a sentence that says what to write instead: never overridden, because that would lose hugepages or a NUMA policy
//! without a word. Memory that is not shared cannot be used at all: a private mapping of a file would even be another memory
//! than the one that amberlog sees.

use super::command_line::CommandLine;
use super::properties::{Properties, size_bytes};

/// Default of QEMU's `-m`, in bytes.
const DEFAULT_BYTES: u64 = 128 << 20;
/// QEMU makes memory a multiple of this, in bytes.
const UNIT_BYTES: u64 = 8192;
/// Objects that are called so are amberlog's.
pub const RESERVED: &str = "amberlog";

/// Where a guest's memory is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GuestMemory {
    /// Nowhere yet: amberlog makes a file of so many bytes for it.
    Ours(u64),
    /// In these backends of the user's, by their ids.
    Theirs(Vec<String>),
}

/// Says where a guest's memory is.
///
/// # Errors
/// A sentence when the arguments contradict each other, or name memory that cannot be shared.
pub fn guest_memory(line: &CommandLine<'_>) -> Result<GuestMemory, String> {
    let machine = line.machine()?;
    if let Some((key, value)) = machine.iter().find(|(key, _)| key.starts_with("memory.") || *key == "memory") {
        return Err(format!("-machine {key}={value}: say the guest's memory with -m instead, where amberlog sees it"));
    }
    if let Some(path) = line.values("mem-path").last() {
        let path = path.to_string_lossy();
        return Err(format!(
            "-mem-path {path} makes memory that is not shared, which amberlog cannot use: write -object \
             memory-backend-file,id=ram,share=on,mem-path={path},size=… -machine memory-backend=ram instead (journal blocks are \
             then copied if that is no file in a tmpfs), or leave it out and amberlog makes memory in a tmpfs"
        ));
    }
    let backends = backends(line)?;
    let find = |id: &str, where_: &str| {
        if backends.iter().any(|backend| backend == id) {
            return Ok(id.to_owned());
        }
        Err(format!("{where_} names the memory backend '{id}', and no -object of the VMM's arguments has that id"))
    };
    let nodes: Vec<Properties> = numa_nodes(line)?;
    let of_nodes: Vec<Option<&str>> = nodes.iter().map(|node| node.get("memdev")).collect();
    match (machine.get("memory-backend"), of_nodes.as_slice()) {
        (Some(id), []) => Ok(GuestMemory::Theirs(vec![find(id, "-machine memory-backend")?])),
        (None, []) => Ok(GuestMemory::Ours(memory_bytes(line)?)),
        (Some(_), nodes) if nodes.iter().any(Option::is_some) => Err(
            "-machine memory-backend and -numa node,memdev both say where the guest's memory is; say it once".to_owned(),
        ),
        (None, nodes) if nodes.iter().all(Option::is_some) => {
            let ids = nodes.iter().flatten().map(|id| find(id, "-numa node,memdev"));
            Ok(GuestMemory::Theirs(ids.collect::<Result<_, _>>()?))
        }
        _ => Err("each -numa node needs a memory backend of its own, which is shared: -object \
                  memory-backend-memfd,id=ram0,share=on,size=… -numa node,memdev=ram0 (QEMU no longer shares the memory out \
                  itself)"
            .to_owned()),
    }
}

fn numa_nodes(line: &CommandLine<'_>) -> Result<Vec<Properties>, String> {
    let mut all = line.properties("numa", Some("type"))?;
    all.retain(|numa| numa.get("type") == Some("node"));
    Ok(all)
}

/// The ids of the memory backends. All of them have to be shared: whatever memory the guest has, it may have disks write to.
fn backends(line: &CommandLine<'_>) -> Result<Vec<String>, String> {
    let mut ids = Vec::new();
    for object in line.properties("object", Some("qom-type"))? {
        let id = object.get("id").unwrap_or_default().to_owned();
        let Some(kind) = object.get("qom-type").filter(|kind| kind.starts_with("memory-backend-")) else { continue };
        let is_shared = match kind {
            // The memory of an SGX enclave: no device reaches it.
            "memory-backend-epc" => continue,
            "memory-backend-memfd" | "memory-backend-shm" => object.is_on("share").unwrap_or(true),
            "memory-backend-ram" => {
                return Err(format!(
                    "the memory backend '{id}' is a {kind}, which has no file that could be shared: use memory-backend-memfd \
                     with share=on (it has the same options), or leave it out and amberlog adds a backend"
                ));
            }
            _ => object.is_on("share").unwrap_or(false),
        };
        if !is_shared {
            return Err(format!(
                "the memory backend '{id}' in the VMM's arguments is not shared: add share=on to it, or leave it out and \
                 amberlog adds one"
            ));
        }
        ids.push(id);
    }
    Ok(ids)
}

/// What `-m` says, in bytes: `512`, `512M`, `1.5G`, `size=2G,slots=…`; several add up key by key.
fn memory_bytes(line: &CommandLine<'_>) -> Result<u64, String> {
    let mut memory = Properties::default();
    for value in line.properties("m", Some("size"))? {
        memory.merge(value);
    }
    let Some(size) = memory.get("size") else { return Ok(DEFAULT_BYTES) };
    let bytes = size_bytes(size, 'M').ok_or_else(|| format!("-m {size}: this is no size of memory"))?;
    let bytes = bytes.checked_next_multiple_of(UNIT_BYTES).ok_or_else(|| format!("-m {size}: impossible size"))?;
    Ok(if bytes == 0 { DEFAULT_BYTES } else { bytes })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsString;

    fn memory(text: &str) -> Result<GuestMemory, String> {
        let words: Vec<OsString> = text.split(' ').map(OsString::from).collect();
        guest_memory(&CommandLine::parse(&words))
    }

    #[test]
    fn sizes() {
        for (text, bytes) in [
            ("q", 128 << 20),
            ("q -m 0", 128 << 20),
            ("q -m 256", 256 << 20),
            ("q -m 2G", 2 << 30),
            ("q --m 1.5G", 3 << 29),
            ("q -m 1G,slots=2,maxmem=4G", 1 << 30),
            ("q -m size=1G,slots=2,maxmem=4G", 1 << 30),
            ("q -m 1 -m 64M", 64 << 20),
            ("q -m 64 -m slots=2,maxmem=4G", 64 << 20),
            ("q -m 100000B", 106_496),
            // A value that looks like an option is none.
            ("q -name -m -m 64", 64 << 20),
        ] {
            assert_eq!(memory(text), Ok(GuestMemory::Ours(bytes)), "{text}");
        }
        for text in ["q -m lots", "q -m 3X", "q -M q35,memory.size=1G", "q -M q35 -machine memory.max-size=1G"] {
            assert!(memory(text).is_err(), "{text}");
        }
    }

    #[test]
    fn the_users_memory_is_used_as_it_is_or_refused() {
        let theirs = |ids: &[&str]| Ok(GuestMemory::Theirs(ids.iter().map(|id| (*id).to_owned()).collect()));
        for (text, expected) in [
            ("q -object memory-backend-memfd,id=m,size=1G -machine memory-backend=m", theirs(&["m"])),
            ("q -object memory-backend-file,id=m,size=1G,mem-path=/x,share -M q35,memory-backend=m", theirs(&["m"])),
            ("q -object memory-backend-file,share=yes,id=m,mem-path=/x,,y -M q35,memory-backend=m", theirs(&["m"])),
            (
                r#"q -object {"qom-type":"memory-backend-file","id":"m","share":true} -M pc,memory-backend=m"#,
                theirs(&["m"]),
            ),
            // The last one counts.
            ("q -object memory-backend-memfd,id=m -M memory-backend=x -machine memory-backend=m", theirs(&["m"])),
            (
                "q -object memory-backend-memfd,id=a -object memory-backend-memfd,id=b -numa node,memdev=a -numa \
                 type=node,memdev=b -numa dist,src=0,dst=1,val=20"
                    .replace("                 ", "")
                    .leak(),
                theirs(&["a", "b"]),
            ),
            // An NVDIMM's backend is not the guest's memory.
            (
                "q -m 1G -object memory-backend-file,id=n,share=on,mem-path=/x -device nvdimm,memdev=n",
                Ok(GuestMemory::Ours(1 << 30)),
            ),
            ("q -object memory-backend-epc,id=e,size=1M -m 64", Ok(GuestMemory::Ours(64 << 20))),
            ("q -object rng-random,id=r,filename=memory-backend-ram -m 64", Ok(GuestMemory::Ours(64 << 20))),
        ] {
            assert_eq!(memory(text), expected, "{text}");
        }
        for (text, word) in [
            ("q -object memory-backend-ram,id=m,size=1G -M q35,memory-backend=m", "memory-backend-memfd"),
            ("q -object memory-backend-ram,id=m,share=on -M q35,memory-backend=m", "memory-backend-memfd"),
            ("q -object memory-backend-file,id=m,mem-path=/x -M q35,memory-backend=m", "share=on"),
            ("q -object memory-backend-file,id=m,share=on,share=off -M q35,memory-backend=m", "share=on"),
            ("q -object memory-backend-memfd,id=m,noshare -M q35,memory-backend=m", "share=on"),
            (r#"q -object {"qom-type":"memory-backend-memfd","id":"m","share":false}"#, "share=on"),
            (r#"q -object {"qom-type":"memory-backend-file","id":"m"}"#, "share=on"),
            (r#"q -object {"qom-type":"memory-backend-file""#, "no JSON"),
            ("q -M q35,memory-backend=m", "no -object"),
            ("q -numa node,memdev=m", "no -object"),
            ("q -numa node -numa node", "each -numa node"),
            ("q -object memory-backend-memfd,id=a -numa node,memdev=a -numa node", "each -numa node"),
            ("q -object memory-backend-memfd,id=a -numa node -M q35,memory-backend=a", "each -numa node"),
            ("q -object memory-backend-memfd,id=a -numa node,memdev=a -M q35,memory-backend=a", "say it once"),
            ("q -mem-path /dev/hugepages", "-mem-path /dev/hugepages"),
        ] {
            let error = memory(text).expect_err(text);
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
