//! What e2fsck itself leaves of an orphan that was being cut short.

use super::{Verdict, debugfs};
use crate::error::Result;
use crate::image::FileSystem;
use crate::program::{command, run};

/// Of what e2fsck said as it mended a copy of `file_system`: takes out of the problems that an inode which it has just cut short has one block
/// too many in its count, if it had a block of attributes. e2fsck (1.47) lets go of that block, as if the inode were being deleted, and leaves the
/// count. A kernel does not, so this says nothing of what a guest has.
pub(super) fn forgive_attributes_let_go(verdict: &mut Verdict, file_system: &FileSystem) -> Result<()> {
    let mut forgiven = Vec::new();
    for line in &verdict.problems {
        let Some((inode, surplus_bytes)) = one_too_many(line) else { continue };
        let cut = format!("Truncating orphaned inode {inode} (");
        if !verdict.orphans.iter().any(|line| line.starts_with(&cut)) {
            continue;
        }
        let text = debugfs(file_system, &format!("stat <{inode}>"))?;
        let attributes = text.split_once("File ACL: ").and_then(|(_, rest)| rest.split_whitespace().next());
        let has_attributes = attributes.and_then(|word| word.parse::<u64>().ok()).is_some_and(|block| block > 0);
        if has_attributes && surplus_bytes == block_bytes(file_system)? {
            forgiven.push(line.clone());
        }
    }
    verdict.problems.retain(|line| !forgiven.contains(line));
    verdict.orphans.extend(forgiven);
    Ok(())
}

/// The inode of `Inode 69, i_blocks is 48, should be 40.  Fix? yes`, and how many bytes it has too many.
fn one_too_many(line: &str) -> Option<(u64, u64)> {
    let (inode, rest) = line.strip_prefix("Inode ")?.split_once(", i_blocks is ")?;
    let (is, rest) = rest.split_once(", should be ")?;
    let number = |text: &str| text.parse::<u64>().ok();
    let surplus = number(is)?.checked_sub(number(rest.split_once('.')?.0)?)?;
    Some((number(inode)?, surplus.checked_mul(512)?))
}

fn block_bytes(file_system: &FileSystem) -> Result<u64> {
    let output = run(command("dumpe2fs")?.arg("-h").arg(file_system.argument()), &[0])?;
    let text = String::from_utf8_lossy(&output.stdout);
    let size = text.lines().find_map(|line| line.strip_prefix("Block size:"));
    Ok(size.and_then(|size| size.trim().parse().ok()).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::super::check;
    use super::super::tests::{content, directory};
    use super::*;
    use crate::image::ExtRecipe;

    #[test]
    fn a_block_of_attributes_of_one_that_is_cut_short_is_no_damage() {
        let (directory, content) = (directory(), content());
        std::fs::write(content.path().join("cut"), vec![7; 70_000]).unwrap();
        let attributes = directory.path().join("attributes");
        std::fs::write(&attributes, vec![b'x'; 700]).unwrap();
        for (has_attributes, surplus) in [(true, 0), (false, 0), (true, 8), (false, 8)] {
            let image = directory.path().join("image");
            let recipe = ExtRecipe { content: Some(content.path().to_owned()), ..ExtRecipe::ext3(16, 4) };
            let file_system = recipe.make(&image).unwrap();
            let request = |request: &str| {
                let output = run(command("debugfs").unwrap().args(["-w", "-R", request]).arg(&image), &[0]).unwrap();
                String::from_utf8_lossy(&output.stdout).into_owned()
            };
            if has_attributes {
                request(&format!("ea_set -f {} /cut user.large", attributes.display()));
            }
            let said = request("stat /cut");
            let field = |name: &str| -> u64 {
                said.split_once(name).unwrap().1.split_whitespace().next().unwrap().parse().unwrap()
            };
            let inode = field("Inode: ");
            request(&format!("sif <{inode}> blocks {}", field("Blockcount: ") + surplus));
            request(&format!("sif <{inode}> size 5000"));
            request(&format!("ssv last_orphan {inode}"));
            let verdict = check(&file_system).unwrap();
            assert_eq!(verdict.is_consistent(), surplus == 0, "attributes: {has_attributes}, {surplus}: {verdict:?}");
            assert!(verdict.orphans.iter().any(|line| line.starts_with("Truncating orphaned")), "{verdict:?}");
            let is_forgiven = verdict.orphans.iter().any(|line| line.contains("i_blocks is"));
            assert_eq!(is_forgiven, has_attributes && surplus == 0, "{verdict:?}");
        }
    }
}
