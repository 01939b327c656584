//! Manual pages and completions, made from what a program says of its own options, so that they never say something else.

use clap::{Command, ValueHint};
use clap_complete::Shell;
use std::io;
use std::path::{Path, PathBuf};

/// Arguments of the hidden command `documents` of each program.
#[derive(clap::Args, Debug)]
pub struct DocumentsArgs {
    /// The directory: pages go to man1/ in it, completions to bash/, zsh/ and fish/.
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    directory: PathBuf,
}

impl DocumentsArgs {
    /// Writes a page for the program and for each of its commands but `others`, which are programs with pages of their own.
    ///
    /// # Errors
    /// When a file or directory cannot be made.
    pub fn write(&self, program: Command, others: &[&str]) -> io::Result<()> {
        let name = program.get_name().to_owned();
        let pages = self.directory.join("man1");
        std::fs::create_dir_all(&pages)?;
        let mut whole = program.clone().disable_help_subcommand(true);
        whole.build();
        write_pages(&whole, &name, others, &pages)?;
        for (shell, directory) in [(Shell::Bash, "bash"), (Shell::Zsh, "zsh"), (Shell::Fish, "fish")] {
            let directory = self.directory.join(directory);
            std::fs::create_dir_all(&directory)?;
            clap_complete::generate_to(shell, &mut program.clone(), &name, &directory)?;
        }
        // As bash-completion looks for it.
        std::fs::rename(
            self.directory.join("bash").join(format!("{name}.bash")),
            self.directory.join("bash").join(&name),
        )
    }
}

fn write_pages(command: &Command, name: &str, others: &[&str], directory: &Path) -> io::Result<()> {
    let shown = command.get_subcommands().filter(|part| !part.is_hide_set());
    for part in shown.filter(|part| !others.contains(&part.get_name())) {
        write_pages(part, &format!("{name}-{}", part.get_name()), &[], directory)?;
    }
    let mut page = Vec::new();
    let title = name.to_owned();
    let of_page = command.clone().name(title.clone()).display_name(title);
    clap_mangen::Man::new(of_page).manual("amberlog").render(&mut page)?;
    std::fs::write(directory.join(format!("{name}.1")), page)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Arg;

    #[test]
    fn every_command_that_is_shown_has_a_page() {
        let directory = tempfile::tempdir().expect("a directory");
        let program = Command::new("tool")
            .about("Does it")
            .subcommand(Command::new("make").about("Makes it").arg(Arg::new("size").long("size").help("How large")))
            .subcommand(Command::new("other").about("Another program"))
            .subcommand(Command::new("secret").hide(true));
        let args = DocumentsArgs { directory: directory.path().to_owned() };
        args.write(program, &["other"]).expect("written");
        let mut pages: Vec<_> = std::fs::read_dir(directory.path().join("man1"))
            .expect("pages")
            .map(|entry| entry.expect("a page").file_name().into_string().expect("text"))
            .collect();
        pages.sort();
        assert_eq!(pages, ["tool-make.1", "tool.1"]);
        let page = std::fs::read_to_string(directory.path().join("man1/tool-make.1")).expect("a page");
        assert!(page.contains("How large") && page.contains("tool\\-make \\- Makes it"), "{page}");
        let first = std::fs::read_to_string(directory.path().join("man1/tool.1")).expect("a page");
        assert!(first.contains("make"), "{first}");
        for (file, words) in [("bash/tool", "--size"), ("zsh/_tool", "--size"), ("fish/tool.fish", "size")] {
            let text = std::fs::read_to_string(directory.path().join(file)).expect(file);
            assert!(text.contains(words) && text.contains("make"), "{file}: {text}");
        }
    }
}
