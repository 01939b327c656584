//! Puts many faults into a source at once: each beside what it replaces, and a word of the environment says which one is on.
//!
//! What is replaced is lines of text, which may be anything. So the least part of the source is looked for that can stand beside what it becomes:
//! statements that declare nothing, an expression, a block. Whether the outcome is what it should be is for the parser to say, then for the compiler, then
//! for a run of the tests with none switched on. What cannot be woven is left to a build of its own.

use crate::list::Mutant;
use std::collections::BTreeMap;
use std::ops::Range;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::visit_mut::{self, VisitMut};
use syn::{Block, Expr, Pat, Stmt};

/// Which fault is on: its number, in the environment of the tests.
pub const SWITCH: &str = "AMBERLOG_SEEDED_FAULT";
/// Of the expressions around a change the least ones are tried.
const EXPRESSIONS_MAX: usize = 3;
const BLOCKS_MAX: usize = 3;

/// Where a fault is in a woven source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its number.
    pub fault: usize,
    /// Lines, from 1.
    pub lines: Range<usize>,
}

/// What stands for a part of a source.
#[derive(Clone, Debug)]
struct Form {
    part: Range<usize>,
    instead: String,
    /// Of an expression: what it becomes. What an operator beside it would take for its own is another fault.
    becomes: Option<String>,
}

/// A source, and the ways in which each of its faults can be woven into it.
pub struct Cloth<'a> {
    text: &'a str,
    faults: BTreeMap<usize, &'a Mutant>,
    /// By the faults' numbers, the least part first.
    forms: BTreeMap<usize, Vec<Form>>,
}

impl<'a> Cloth<'a> {
    /// Of `text` and its faults, each with a number.
    pub fn of(text: &'a str, faults: &[(usize, &'a Mutant)]) -> Self {
        let mut cloth = Self { text, faults: faults.iter().copied().collect(), forms: BTreeMap::new() };
        let Ok(file) = syn::parse_file(text) else { return cloth };
        let mut parts = Parts::default();
        parts.visit_file(&file);
        for (number, mutant) in faults {
            cloth.forms.insert(*number, cloth.forms_of(*number, mutant, &parts));
            cloth.settle(*number);
        }
        cloth
    }

    /// The next way for this fault, if there is one.
    pub fn try_next(&mut self, fault: usize) {
        if let Some(forms) = self.forms.get_mut(&fault).filter(|forms| !forms.is_empty()) {
            forms.remove(0);
            self.settle(fault);
        }
    }

    /// Leaves out ways until there is one that makes a source.
    fn settle(&mut self, fault: usize) {
        let (text, mutant) = (self.text, self.faults[&fault]);
        let Some(forms) = self.forms.get_mut(&fault) else { return };
        let whole = |form: &Form, instead: &str| [&text[..form.part.start], instead, &text[form.part.end..]].concat();
        let makes_a_source = |form: &Form| {
            let meant = |becomes: &String| {
                let mutated =
                    syn::parse_file(&text.replacen(&mutant.old, &mutant.new, 1)).ok().map(without_parentheses);
                syn::parse_file(&whole(form, &format!("({becomes})"))).ok().map(without_parentheses) == mutated
            };
            form.becomes.as_ref().is_none_or(meant) && syn::parse_file(&whole(form, &form.instead)).is_ok()
        };
        let out = forms.iter().take_while(|form| !makes_a_source(form)).count();
        forms.drain(..out);
    }

    /// The source with as many faults in it as can be at once, and where they are. Of faults that overlap the first is.
    pub fn weave(&self) -> (String, Vec<Place>) {
        let mut woven: BTreeMap<usize, (&Form, usize)> = BTreeMap::new();
        for (fault, forms) in &self.forms {
            let Some(form) = forms.first() else { continue };
            let overlaps =
                |(other, _): &(&Form, usize)| other.part.start < form.part.end && form.part.start < other.part.end;
            if !woven.values().any(overlaps) && !woven.contains_key(&form.part.start) {
                woven.insert(form.part.start, (form, *fault));
            }
        }
        let (mut whole, mut places, mut end) = (String::new(), Vec::new(), 0);
        for (form, fault) in woven.into_values() {
            whole.push_str(&self.text[end..form.part.start]);
            let first = whole.matches('\n').count() + 1;
            whole.push_str(&form.instead);
            places.push(Place { fault, lines: first..whole.matches('\n').count() + 2 });
            end = form.part.end;
        }
        whole.push_str(&self.text[end..]);
        (whole, places)
    }

    fn forms_of(&self, number: usize, mutant: &Mutant, parts: &Parts) -> Vec<Form> {
        let Some(start) = self.text.find(&mutant.old) else { return Vec::new() };
        let (old, new) = (&mutant.old, &mutant.new);
        let mut forms = Vec::new();
        // Lines that differ.
        let before: usize = old
            .split_inclusive('\n')
            .zip(new.split_inclusive('\n'))
            .take_while(|(a, b)| a == b)
            .map(|(a, _)| a.len())
            .sum();
        let (old_lines, new_lines) = (&old[before..], &new[before..]);
        let behind: usize = (old_lines.split_inclusive('\n').rev().zip(new_lines.split_inclusive('\n').rev()))
            .take_while(|(a, b)| a == b)
            .map(|(a, _)| a.len())
            .sum();
        let (old_lines, new_lines) = (&old_lines[..old_lines.len() - behind], &new_lines[..new_lines.len() - behind]);
        if is_statements(old_lines) && is_statements(new_lines) {
            let part = start + before..start + before + old_lines.len();
            forms.push(Form {
                part,
                instead: either(number, &braced(new_lines), &braced(old_lines)) + "\n",
                becomes: None,
            });
        }
        // What differs within them, and the parts around it.
        let same = |(a, b): &(char, char)| a == b;
        let before: usize = old.chars().zip(new.chars()).take_while(same).map(|(a, _)| a.len_utf8()).sum();
        let rest = (old[before..].chars().rev()).zip(new[before..].chars().rev());
        let behind: usize = rest.take_while(same).map(|(a, _)| a.len_utf8()).sum();
        let change = start + before..start + old.len() - behind;
        let becomes = &new[before..new.len() - behind];
        let changed = |part: &Range<usize>| {
            [&self.text[part.start..change.start], becomes, &self.text[change.end..part.end]].concat()
        };
        let around = |parts: &[Range<usize>], most: usize| {
            let mut found: Vec<Range<usize>> =
                parts.iter().filter(|part| part.start <= change.start && change.end <= part.end).cloned().collect();
            found.sort_by_key(Range::len);
            found.truncate(most);
            found
        };
        for part in around(&parts.expressions, EXPRESSIONS_MAX) {
            let new = changed(&part);
            if is_expression(&new) {
                let instead = format!("({})", either(number, &braced(&new), &braced(&self.text[part.clone()])));
                forms.push(Form { part, instead, becomes: Some(new) });
            }
        }
        for part in around(&parts.blocks, BLOCKS_MAX) {
            let new = changed(&part);
            if syn::parse_str::<Block>(&new).is_ok() {
                let instead = braced(&either(number, &new, &self.text[part.clone()]));
                forms.push(Form { part, instead, becomes: None });
            }
        }
        forms
    }
}

/// So that two sources can be compared which mean the same.
fn without_parentheses(mut file: syn::File) -> syn::File {
    struct Strip;
    impl VisitMut for Strip {
        fn visit_expr_mut(&mut self, expression: &mut Expr) {
            while let Expr::Paren(inner) = expression {
                *expression = (*inner.expr).clone();
            }
            visit_mut::visit_expr_mut(self, expression);
        }
    }
    Strip.visit_file_mut(&mut file);
    file
}

/// The parts of a source that something else may stand for.
#[derive(Default)]
struct Parts {
    expressions: Vec<Range<usize>>,
    blocks: Vec<Range<usize>>,
}

impl<'ast> Visit<'ast> for Parts {
    fn visit_expr(&mut self, expression: &'ast Expr) {
        if !has_let(expression) {
            self.expressions.push(expression.span().byte_range());
        }
        visit::visit_expr(self, expression);
    }

    /// An expression that is a statement without a semicolon stays one.
    fn visit_stmt(&mut self, statement: &'ast Stmt) {
        match statement {
            Stmt::Expr(expression, None) => visit::visit_expr(self, expression),
            _ => visit::visit_stmt(self, statement),
        }
    }

    fn visit_block(&mut self, block: &'ast Block) {
        self.blocks.push(block.span().byte_range());
        visit::visit_block(self, block);
    }

    /// What a type or a pattern holds is constant.
    fn visit_type(&mut self, _: &'ast syn::Type) {}
    fn visit_pat(&mut self, _: &'ast Pat) {}
    fn visit_item_const(&mut self, _: &'ast syn::ItemConst) {}
    fn visit_item_static(&mut self, _: &'ast syn::ItemStatic) {}
}

/// An expression that is true while fault `number` is on. It is looked up once for each place.
fn is_on(number: usize) -> String {
    format!(
        "{{ static IS_ON: ::std::sync::OnceLock<bool> = ::std::sync::OnceLock::new(); \
         *IS_ON.get_or_init(|| ::std::env::var_os(\"{SWITCH}\").is_some_and(|fault| fault == \"{number}\")) }}"
    )
}

fn either(number: usize, new: &str, old: &str) -> String {
    format!("if {} {new} else {old}", is_on(number))
}

fn braced(text: &str) -> String {
    format!("{{\n{text}\n}}")
}

/// Statements that declare nothing for those behind them, and keep nothing until the block's end.
fn is_statements(text: &str) -> bool {
    let keeps_nothing = |statement: &Stmt| match statement {
        Stmt::Expr(..) | Stmt::Macro(_) => true,
        Stmt::Local(local) => matches!(local.pat, Pat::Wild(_)),
        Stmt::Item(_) => false,
    };
    syn::parse_str::<Block>(&braced(text)).is_ok_and(|block| block.stmts.iter().all(keeps_nothing))
}

fn is_expression(text: &str) -> bool {
    syn::parse_str::<Expr>(text).is_ok_and(|expression| !has_let(&expression))
}

/// `let` in a condition binds for what comes behind.
fn has_let(expression: &Expr) -> bool {
    match expression {
        Expr::Let(_) => true,
        Expr::Binary(both) => has_let(&both.left) || has_let(&both.right),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mutant(old: &str, new: &str) -> Mutant {
        Mutant { old: old.to_owned(), new: new.to_owned(), ..Mutant::default() }
    }

    fn woven(text: &str, faults: &[Mutant]) -> (String, Vec<Place>) {
        let numbered: Vec<(usize, &Mutant)> = faults.iter().enumerate().collect();
        Cloth::of(text, &numbered).weave()
    }

    const SOURCE: &str = "\
fn one(a: u32) -> u32 {
    let b = a + 1;
    if b > 2
        && a > 1
    {
        store(b);
        return b;
    }
    match a {
        1 => b,
        _ => both(
            a,
            b,
        ),
    }
}
";

    #[test]
    fn what_can_stand_beside_what_replaces_it_does() {
        let faults = [
            ("    let b = a + 1;\n", "    let b = a;\n", "a + 1"),
            ("        && a > 1\n", "        && a >= 1\n", "a > 1"),
            ("        store(b);\n", "", "store(b);"),
            ("        1 => b,\n", "        1 => a,\n", "b"),
            ("            a,\n", "            b,\n", "a"),
        ];
        let (text, places) = woven(SOURCE, &faults.map(|(old, new, _)| mutant(old, new)));
        assert_eq!(places.len(), faults.len(), "{text}");
        syn::parse_file(&text).expect("a source");
        let lines: Vec<&str> = text.lines().collect();
        for place in places {
            let own = lines[place.lines.start - 1..place.lines.end - 1].join("\n");
            assert!(own.contains(&format!("\"{}\"", place.fault)), "{own}");
            assert!(
                own.contains(&format!("else {{\n{}", faults[place.fault].2)) || own.contains("    store(b);"),
                "{own}"
            );
        }
    }

    /// What is switched off is the source as it was, whatever stands around it.
    #[test]
    fn what_declares_something_is_woven_with_the_block_around_it() {
        for (old, new) in [
            ("    let b = a + 1;\n", "    let b = a + 1;\n    let a = b;\n"),
            ("        store(b);\n", "        let b = 1;\n"),
            ("    if b > 2\n        && a > 1\n    {\n", "    {\n"),
        ] {
            let (text, places) = woven(SOURCE, &[mutant(old, new)]);
            assert_eq!(places.len(), 1, "{old}");
            syn::parse_file(&text).expect("a source");
            assert!(text.contains(old) && text.contains(new), "{text}");
        }
    }

    #[test]
    fn an_operator_beside_a_change_takes_what_is_its_own() {
        let source = "fn one(a: u32) -> u32 {\n    2 * a\n}\n";
        let (text, _) = woven(source, &[mutant("    2 * a\n", "    2 * a + 1\n")]);
        assert!(text.contains("{\n    2 * a + 1\n") || text.contains("{\n2 * a + 1\n"), "{text}");
    }

    #[test]
    fn what_is_no_part_of_a_function_is_left_alone() {
        let source = "const A: u32 = 1;\n";
        let (text, places) = woven(source, &[mutant(source, "const A: u32 = 2;\n")]);
        assert_eq!((text.as_str(), places.len()), (source, 0));
    }

    #[test]
    fn of_two_that_overlap_the_first_is_woven() {
        let faults = [mutant("        store(b);\n", ""), mutant("        store(b);\n        return b;\n", "")];
        let (_, places) = woven(SOURCE, &faults);
        assert_eq!(places.iter().map(|place| place.fault).collect::<Vec<_>>(), [0]);
    }

    /// Most of the list is built together, or a call takes days. Each eighth source stands for all.
    #[test]
    fn most_of_the_list_can_be_woven() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let mutants = crate::list::parse(include_str!("../../../mutants.list")).expect("the list is well formed");
        let mut by_file: BTreeMap<&str, Vec<(usize, &Mutant)>> = BTreeMap::new();
        for (number, mutant) in mutants.iter().enumerate().filter(|(_, mutant)| mutant.file.ends_with(".rs")) {
            by_file.entry(&mutant.file).or_default().push((number, mutant));
        }
        let (mut woven, mut all) = (0, 0);
        for (file, faults) in by_file.into_iter().step_by(8) {
            let text = std::fs::read_to_string(root.join(file)).expect("a source");
            let (with_them, places) = Cloth::of(&text, &faults).weave();
            syn::parse_file(&with_them).expect("a source");
            woven += places.len();
            all += faults.len();
        }
        assert!(4 * woven > 3 * all, "{woven} of {all}");
    }
}
