//! C sources for the compile load: a freestanding program of many units, like a kernel's. The same seed gives the same text.
//!
//! A unit includes a few headers (structures and inline functions), has tables and functions with loops, branches and calls
//! into other units, and needs nothing of a C library. All units link into one program.

use crate::options::Options;
use crate::random::Random;
use crate::{Result, at};
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Headers that there are, and that a unit includes.
const HEADERS: u64 = 40;
const HEADERS_PER_UNIT: u64 = 6;
const FIELDS: u64 = 24;
const INLINES_PER_HEADER: u64 = 8;
const FUNCTIONS_PER_UNIT: u64 = 10;
const TABLE_WORDS: u64 = 256;
/// Headers lie here, below the sources.
pub const INCLUDE: &str = "include";

/// `guest-tools sources --directory D [--units N] [--seed N]`: N (400) units and their headers.
pub fn run(mut options: Options) -> Result<()> {
    let root = PathBuf::from(options.required("directory")?);
    let units = options.number("units", 400, 1..=100_000)?;
    let seed = options.number("seed", 1, 0..=u64::MAX)?;
    options.finish()?;
    let include = root.join(INCLUDE);
    std::fs::create_dir_all(&include).map_err(at("create", &include))?;
    for header in 0..HEADERS {
        write(&include.join(format!("header-{header}.h")), &header_text(header, seed))?;
    }
    for unit in 0..units {
        write(&unit_path(&root, unit), &unit_text(unit, units, seed))?;
    }
    Ok(())
}

/// Where a unit's source is.
pub fn unit_path(root: &Path, unit: u64) -> PathBuf {
    root.join(format!("unit-{unit}.c"))
}

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).map_err(at("write", path))
}

fn header_text(header: u64, seed: u64) -> String {
    let mut random = Random::of(seed, 1 << 32 | header);
    let mut text = format!(
        "#ifndef HEADER_{header}_H\n#define HEADER_{header}_H\nstruct record_{header} {{\n    unsigned long first;\n"
    );
    for field in 0..FIELDS {
        let kind = ["unsigned long", "int", "unsigned short", "struct record_0 *"][pick(&mut random, 4)];
        let kind = if header == 0 && kind.starts_with("struct") { "long" } else { kind };
        let _ = writeln!(text, "    {kind} field_{field}; /* what the field with number {field} is for */");
    }
    text.push_str("};\n");
    for inline in 0..INLINES_PER_HEADER {
        let (mask, shift) = (random.below(1 << 16), 1 + random.below(7));
        let _ = writeln!(
            text,
            "static inline unsigned long mix_{header}_{inline}(const struct record_{header} *record, unsigned long value)\n{{\n    \
             value ^= (unsigned long)record->field_{} + {mask}UL;\n    if (value & {mask}UL)\n        value = value >> {shift} ^ \
             (unsigned long)record->field_{};\n    return value * 2654435761UL;\n}}",
            random.below(FIELDS),
            random.below(FIELDS)
        );
    }
    text.push_str("#endif\n");
    if header == 0 { text } else { text.replacen("struct record_", "struct record_0;\nstruct record_", 1) }
}

fn unit_text(unit: u64, units: u64, seed: u64) -> String {
    let mut random = Random::of(seed, unit);
    let headers: Vec<u64> = (0..HEADERS_PER_UNIT).map(|_| random.below(HEADERS)).collect();
    let mut text = format!("/* Unit {unit} of {units}. */\n");
    for header in &headers {
        let _ = writeln!(text, "#include \"header-{header}.h\"");
    }
    let _ = write!(text, "static const unsigned int table_{unit}[{TABLE_WORDS}] = {{");
    for word in 0..TABLE_WORDS {
        let _ = write!(text, "{}{}u,", if word % 8 == 0 { "\n    " } else { " " }, random.below(1 << 32));
    }
    text.push_str("\n};\n");
    for function in 0..FUNCTIONS_PER_UNIT {
        let header = headers[pick(&mut random, headers.len())];
        let next = random.below(units);
        let _ = writeln!(text, "unsigned long work_{next}_0(unsigned long value, int depth);");
        let _ = writeln!(text, "unsigned long work_{unit}_{function}(unsigned long value, int depth)\n{{");
        let _ = writeln!(
            text,
            "    struct record_{header} record = {{ 0 }};\n    int i;\n    if (depth > 3)\n        return value;"
        );
        let _ = writeln!(text, "    for (i = 0; i < {}; i++) {{", 4 + random.below(60));
        let _ = writeln!(text, "        record.first += table_{unit}[(value + i) & {}];", TABLE_WORDS - 1);
        text.push_str("        switch (value & 7) {\n");
        for case in 0..8 {
            let inline = random.below(INLINES_PER_HEADER);
            let _ = writeln!(
                text,
                "        case {case}: value = mix_{header}_{inline}(&record, value + {}u); break;",
                random.below(1 << 20)
            );
        }
        let _ = writeln!(text, "        }}\n    }}\n    return work_{next}_0(value, depth + 1);\n}}");
    }
    if unit == 0 {
        text.push_str(
            "unsigned long result;\nvoid _start(void)\n{\n    result = work_0_0(1, 0);\n    for (;;)\n        ;\n}\n",
        );
    }
    text
}

fn pick(random: &mut Random, count: usize) -> usize {
    usize::try_from(random.below(count as u64)).unwrap_or(0)
}
