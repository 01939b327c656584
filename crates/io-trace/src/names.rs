//! The VMs and disks of a trace.

use std::collections::HashMap;

/// A VM: its number is its place in [`Names::vms`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vm {
    /// The VM's name.
    pub name: String,
}

/// A disk: its number is its place in [`Names::disks`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// The VM that owns it.
    pub vm: u16,
    /// The disk's name within its VM.
    pub name: String,
    /// Its size in bytes, 0 where unknown.
    pub capacity_bytes: u64,
}

/// The VMs and disks that a trace's records refer to by number. At most 65,536 of each.
#[derive(Clone, Debug, Default)]
pub struct Names {
    vms: Vec<Vm>,
    disks: Vec<Disk>,
    by_vm: HashMap<String, u16>,
    by_disk: HashMap<(u16, String), u16>,
    last_vm: u16,
    last_disk: u16,
}

impl PartialEq for Names {
    fn eq(&self, other: &Names) -> bool {
        self.vms == other.vms && self.disks == other.disks
    }
}

impl Eq for Names {}

/// Longest name kept, in bytes; a longer one is cut at a character boundary.
pub const NAME_BYTES_MAX: usize = 255;

fn cut(name: &str) -> &str {
    let mut end = name.len().min(NAME_BYTES_MAX);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    &name[..end]
}

impl Names {
    /// No VMs, no disks.
    pub fn new() -> Names {
        Names::default()
    }

    /// One unnamed VM with one disk: what formats without names have.
    pub fn single(disk: &str) -> Names {
        let mut names = Names::new();
        names.vm("host").and_then(|vm| names.disk(vm, disk, 0));
        names
    }

    /// The number of the VM with this name, added if new; `None` when there are 65,536 already.
    pub fn vm(&mut self, name: &str) -> Option<u16> {
        let name = cut(name);
        // Text traces ask for every line, and mostly for the one they asked for last.
        if self.vms.get(usize::from(self.last_vm)).is_some_and(|vm| vm.name == name) {
            return Some(self.last_vm);
        }
        if let Some(&number) = self.by_vm.get(name) {
            self.last_vm = number;
            return Some(number);
        }
        let number = u16::try_from(self.vms.len()).ok()?;
        self.vms.push(Vm { name: name.to_owned() });
        self.by_vm.insert(name.to_owned(), number);
        Some(number)
    }

    /// The number of this VM's disk, added if new; `None` when there are 65,536 already or no such VM.
    /// A known disk keeps the larger of both sizes.
    pub fn disk(&mut self, vm: u16, name: &str, capacity_bytes: u64) -> Option<u16> {
        self.vms.get(usize::from(vm))?;
        if let Some(last) = self.disks.get_mut(usize::from(self.last_disk))
            && last.vm == vm
            && last.name == cut(name)
        {
            last.capacity_bytes = last.capacity_bytes.max(capacity_bytes);
            return Some(self.last_disk);
        }
        let key = (vm, cut(name).to_owned());
        if let Some(&number) = self.by_disk.get(&key) {
            let disk = &mut self.disks[usize::from(number)];
            disk.capacity_bytes = disk.capacity_bytes.max(capacity_bytes);
            self.last_disk = number;
            return Some(number);
        }
        let number = u16::try_from(self.disks.len()).ok()?;
        self.disks.push(Disk { vm, name: key.1.clone(), capacity_bytes });
        self.by_disk.insert(key, number);
        Some(number)
    }

    /// All VMs, by number.
    pub fn vms(&self) -> &[Vm] {
        &self.vms
    }

    /// All disks, by number.
    pub fn disks(&self) -> &[Disk] {
        &self.disks
    }

    /// The VM's name, or its number where it has none.
    pub fn vm_name(&self, vm: u16) -> String {
        self.vms.get(usize::from(vm)).map_or_else(|| format!("vm{vm}"), |v| v.name.clone())
    }

    /// The disk's name, or its number where it has none.
    pub fn disk_name(&self, disk: u16) -> String {
        self.disks.get(usize::from(disk)).map_or_else(|| format!("disk{disk}"), |d| d.name.clone())
    }
}
