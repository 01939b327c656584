//! Which kernel modules a guest must load, and in which order: read from the modules themselves,
//! because an unpacked (never installed) kernel package has no `modules.dep`.
//!
//! Failure story: a module that is neither built in nor a file is an error that names it.

use crate::error::{Error, FileContext, Result};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The modules of one unpacked kernel.
pub struct ModuleTree {
    files: BTreeMap<String, PathBuf>,
    built_in: Vec<String>,
}

impl ModuleTree {
    /// Looks over `lib/modules/VERSION` (`directory`).
    pub fn read(directory: &Path) -> Result<Self> {
        let mut files = BTreeMap::new();
        let mut pending = vec![directory.join("kernel")];
        while let Some(next) = pending.pop() {
            for entry in std::fs::read_dir(&next).at("read", &next)? {
                let path = entry.at("read", &next)?.path();
                if path.is_dir() {
                    pending.push(path);
                } else if path.extension().is_some_and(|extension| extension == "ko") {
                    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
                    files.insert(canonical(&stem), path);
                }
            }
        }
        let list = directory.join("modules.builtin");
        let built_in = std::fs::read_to_string(&list)
            .at("read", &list)?
            .lines()
            .filter_map(|line| Path::new(line).file_stem())
            .map(|stem| canonical(&stem.to_string_lossy()))
            .collect();
        Ok(Self { files, built_in })
    }

    /// The files to insert for `wanted`, each after all that it depends on. Modules that are
    /// built into the kernel need nothing.
    pub fn load_order(&self, wanted: &[&str]) -> Result<Vec<PathBuf>> {
        let mut order = Vec::new();
        for name in wanted {
            self.visit(&canonical(name), &mut order, 0)?;
        }
        Ok(order)
    }

    fn visit(&self, name: &str, order: &mut Vec<PathBuf>, depth: usize) -> Result<()> {
        if self.built_in.iter().any(|built_in| built_in == name) {
            return Ok(());
        }
        let path = self
            .files
            .get(name)
            .ok_or_else(|| Error::Assets(format!("the guest's kernel has no module {name}, built in or as a file")))?;
        if order.contains(path) {
            return Ok(());
        }
        if depth > 32 {
            return Err(Error::Assets(format!("the dependencies of module {name} form a loop")));
        }
        let content = std::fs::read(path).at("read", path)?;
        for dependency in depends(&content) {
            self.visit(&canonical(&dependency), order, depth + 1)?;
        }
        order.push(path.clone());
        Ok(())
    }
}

/// Modules are named with `-` or `_`, indifferently.
fn canonical(name: &str) -> String {
    name.replace('-', "_")
}

/// The `depends=` entry of a module's `.modinfo` section: zero-terminated `key=value` strings.
fn depends(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = module.windows(KEY.len()).position(|window| window == KEY) else {
        return Vec::new();
    };
    let value = &module[at + KEY.len()..];
    let end = value.iter().position(|&byte| byte == 0).unwrap_or(value.len());
    String::from_utf8_lossy(&value[..end]).split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(modules: &[(&str, &str)], built_in: &str) -> (tempfile::TempDir, ModuleTree) {
        let directory = tempfile::tempdir().unwrap();
        let kernel = directory.path().join("kernel/drivers");
        std::fs::create_dir_all(&kernel).unwrap();
        for (name, depends) in modules {
            let content = format!("ELF\0license=GPL\0depends={depends}\0name={name}\0");
            std::fs::write(kernel.join(format!("{name}.ko")), content).unwrap();
        }
        std::fs::write(directory.path().join("modules.builtin"), built_in).unwrap();
        let tree = ModuleTree::read(directory.path()).unwrap();
        (directory, tree)
    }

    #[test]
    fn dependencies_come_first_and_built_in_ones_not_at_all() {
        let (_directory, tree) = tree(
            &[("virtio_blk", "virtio,virtio_ring"), ("virtio", ""), ("virtio-ring", "virtio")],
            "kernel/fs/ext4/ext4.ko\n",
        );
        let order: Vec<String> = tree
            .load_order(&["virtio_blk", "ext4"])
            .unwrap()
            .iter()
            .map(|path| path.file_stem().unwrap().to_string_lossy().into_owned())
            .collect();
        assert_eq!(order, ["virtio", "virtio-ring", "virtio_blk"]);
    }

    #[test]
    fn a_missing_module_is_named() {
        let (_directory, tree) = tree(&[("a", "b")], "");
        let error = tree.load_order(&["a"]).unwrap_err().to_string();
        assert!(error.contains("no module b"), "{error}");
    }

    #[test]
    fn a_loop_is_an_error_and_not_a_hang() {
        let (_directory, tree) = tree(&[("a", "b"), ("b", "a")], "");
        assert!(tree.load_order(&["a"]).is_err());
    }
}
