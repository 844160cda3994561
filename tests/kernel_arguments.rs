//! The argument structs of launches have the fields of the kernels' structs: same names, same order, same
//! types. Both sides lay out structs by the C rules, so equal fields have equal offsets. (A test of
//! `cuda::modules` compares the sizes with the PTX.)

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// A field: its name, and its type: "pointer", a number type, an array, or the name of another struct.
type Field = (String, String);

/// Returns every file below a folder with one of these extensions, concatenated, without comments.
fn text(folder: &str, endings: &[&str]) -> String {
    fn collect(folder: &Path, endings: &[&str], text: &mut String) {
        let mut entries: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        entries.sort();
        for path in entries {
            if path.is_dir() {
                collect(&path, endings, text);
            } else if path.extension().is_some_and(|e| endings.contains(&e.to_str().unwrap())) {
                let source = fs::read_to_string(&path).unwrap();
                for line in source.lines() {
                    text.push_str(line.split("//").next().unwrap());
                    text.push('\n');
                }
            }
        }
    }
    let mut text = String::new();
    collect(&Path::new(env!("CARGO_MANIFEST_DIR")).join(folder), endings, &mut text);
    text
}

/// Returns the text between the first "{" and its "}".
fn body(text: &str) -> &str {
    let start = text.find('{').unwrap() + 1;
    &text[start..start + text[start..].find('}').unwrap()]
}

/// Returns the identifier that a text starts with.
fn name(text: &str) -> &str {
    text.split(|c: char| !(c.is_alphanumeric() || c == '_')).next().unwrap()
}

/// Parses `#[repr(C)] struct NAME { field: Type, ... }`.
fn rust_structs(text: &str) -> BTreeMap<String, Vec<Field>> {
    let mut found = BTreeMap::new();
    for part in text.split("#[repr(C)]").skip(1) {
        let declared = part.split_once("struct ").unwrap().1;
        let fields =
            body(declared).split(",\n").map(str::trim).filter(|field| !field.is_empty()).map(|field| {
                let visible = field.strip_prefix("pub(").map(|rest| rest.split_once(") ").unwrap().1);
                let (field, kind) = visible.unwrap_or(field).split_once(": ").unwrap();
                let kind = kind.trim().trim_end_matches(',');
                let kind = if kind.starts_with('*') { "pointer" } else { kind };
                (field.to_owned(), kind.to_owned())
            });
        found.insert(name(declared).to_owned(), fields.collect());
    }
    found
}

/// Parses `struct NAME { type field, field; ... };`.
fn cuda_struct(text: &str, wanted: &str) -> Option<Vec<Field>> {
    let at = text.find(&format!("struct {wanted} {{"))?;
    let mut fields = Vec::new();
    for declaration in body(&text[at..]).split(';').map(str::trim).filter(|d| !d.is_empty()) {
        let declaration = declaration.trim_start_matches("const ");
        let kind = name(declaration);
        for field in declaration[kind.len()..].split(',').map(str::trim) {
            let (pointer, field) = (field.starts_with('*'), field.trim_start_matches('*').trim());
            let kind = match kind {
                _ if pointer => "pointer".to_owned(),
                "float" => "f32".to_owned(),
                "double" => "f64".to_owned(),
                kind => match field.split_once('[') {
                    Some((_, count)) => format!("[{kind}; {}]", count.trim_end_matches(']')),
                    None => kind.to_owned(),
                },
            };
            fields.push((name(field).to_owned(), kind));
        }
    }
    Some(fields)
}

#[test]
fn argument_structs_match_the_kernels() {
    let source = text("src/cuda", &["rs"]);
    let (rust, cuda) = (rust_structs(&source), text("src/cuda/kernels", &["cu", "cuh"]));
    assert!(rust.len() >= 21, "only {:?}", rust.keys());
    let lists = source.split("args!(").skip(1).map(|rest| rest.split(')').next().unwrap());
    let passed: Vec<_> = lists.flat_map(|list| list.split(',')).map(|one| name(one.trim())).collect();
    assert!(passed.len() >= 21, "only {passed:?}");
    for passed in passed {
        assert!(rust.contains_key(passed), "{passed} is not repr(C)");
    }
    for (name, fields) in &rust {
        assert_eq!(cuda.matches(&format!("struct {name} {{")).count(), 1, "{name}");
        assert_eq!(Some(fields), cuda_struct(&cuda, name).as_ref(), "{name}");
    }
}

/// Returns the number after a constant's declaration.
fn constant(text: &str, declared: &str) -> u64 {
    let number = text.split_once(declared).unwrap_or_else(|| panic!("no {declared}")).1.trim();
    let number = number.split(|c: char| !(c.is_alphanumeric() || c == '_')).next().unwrap();
    let digits = number.trim_end_matches('u').replace('_', "");
    let parsed = digits.strip_prefix("0x").map_or(digits.parse(), |hex| u64::from_str_radix(hex, 16));
    parsed.unwrap_or_else(|_| panic!("{declared} {number}"))
}

#[test]
fn constants_match_the_kernels() {
    let (rust, cuda) = (text("src/cuda", &["rs"]), text("src/cuda/kernels", &["cu", "cuh"]));
    assert_eq!(constant(&rust, "const MOST_OWN: u64 ="), constant(&cuda, "#define MOST_OWN"));
    assert_eq!(constant(&rust, "const MAXIMUM: u32 ="), constant(&cuda, "#define MAXIMUM"));
    assert_eq!(constant(&rust, "const RESCALE_BLOCKS: u64 ="), constant(&cuda, "#define RESCALE_BLOCKS"));
    for flag in [
        "X_VECTORS",
        "ROW_VECTORS",
        "COL_VECTORS",
        "PACKED",
        "FLOOR_RULE",
        "ROW_SCALE_WORDS",
        "COL_SCALE_WORDS",
        "FOUND",
        "GRAD_BF16",
        "GRAD_F16",
        "MOMENTS_BF16",
        "VECTORS",
        "IS_E5M2",
        "IS_E8M0",
        "MAXIMIZE",
        "STOCHASTIC",
        "FLOOR",
        "ROWS_VECTORS",
        "GRAD_VECTORS",
        "OUT_VECTORS",
        "F32_WEIGHTS",
    ] {
        let in_rust = constant(&rust, &format!("const {flag}: u32 ="));
        assert_eq!(in_rust, constant(&cuda, &format!("\n  {flag} =")), "{flag}");
    }
}

#[test]
fn swapped_fields_are_detected() {
    let cuda = "struct Args {\n  const void *x;\n  i64 rows, cols;\n  float rule;\n  Entry entries[N];\n};";
    let rust =
        |fields: &str| rust_structs(&format!("#[repr(C)]\nstruct Args<const N: usize> {{\n{fields}}}\n"));
    let same = "x: *const u8,\n    pub(super) rows: i64,\n    cols: i64,\n    rule: f32,\n    entries: [Entry; N],\n";
    assert_eq!(rust(same)["Args"], cuda_struct(cuda, "Args").unwrap());
    let swapped = same.replace("rows", "r").replace("cols", "rows").replace("r:", "cols:");
    assert_ne!(rust(&swapped)["Args"], cuda_struct(cuda, "Args").unwrap());
    assert_eq!(cuda_struct(cuda, "Other"), None);
}
