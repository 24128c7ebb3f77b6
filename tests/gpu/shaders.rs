//! Shaders: valid on their own, within WebGPU's limits, and in step with the host's structs.

use kivi_wgpu::internals::gpu::{IoParams, Pass, PassParams, ViewParams};
use kivi_wgpu::{Bits, CacheConfig, Dtype, Shape, TensorFormat, Variant, ZeroPoint};
use std::collections::BTreeSet;
use std::mem::{offset_of, size_of};

fn shapes() -> Vec<Shape> {
    let mut out = Vec::new();
    for head_dim in [8, 24, 64, 72, 80, 96, 128, 136, 256, 264, 512] {
        for (query_heads, kv_heads) in [(1, 1), (7, 1), (8, 2), (16, 1)] {
            for &bits in Bits::ALL {
                let config = CacheConfig::new(1, query_heads, kv_heads, head_dim)
                    .with_bits(bits, bits)
                    .with_group_size(if bits == Bits::Four { 16 } else { 32 })
                    .with_window_format(if bits == Bits::Two { Dtype::F16 } else { Dtype::F32 })
                    .with_zero_point(if bits == Bits::Two { ZeroPoint::Min } else { ZeroPoint::Rounded });
                out.push(Shape::new(&config).unwrap());
                if bits.is_quantized() {
                    let rotated = TensorFormat::new(bits).with_rotation().with_clipping();
                    let rotated =
                        config.clone().with_formats(TensorFormat::new(bits).with_clipping(), rotated);
                    for value_group in [16, head_dim] {
                        let config = rotated.clone().with_group_size(128).with_value_group_size(value_group);
                        out.push(Shape::new(&config).unwrap());
                    }
                }
                if bits == Bits::Two {
                    // As many parameters as a block can have.
                    let many = config.clone().with_group_size(128).with_value_group_size(16);
                    out.push(Shape::new(&many).unwrap());
                    out.push(Shape::new(&config.with_group_size(128)).unwrap());
                }
            }
        }
    }
    out
}

fn parse(pass: Pass, g: &Shape, variant: Variant) -> naga::Module {
    let source = pass.source(g, variant);
    naga::front::wgsl::parse_str(source.text()).unwrap_or_else(|error| {
        let line = error.location(source.text()).map_or(1, |l| l.line_number);
        let (file, line) = source.locate(line);
        panic!("{file}:{line}: {}", error.emit_to_string(source.text()));
    })
}

/// What naga must allow for a variant: what WebGPU has without optional features, and what the variant's
/// features add.
fn capabilities(variant: Variant) -> naga::valid::Capabilities {
    use naga::valid::Capabilities;
    let mut capabilities = Capabilities::SHADER_FLOAT16_IN_FLOAT32;
    if variant.features().contains(kivi_wgpu::wgpu::Features::SUBGROUP) {
        capabilities |= Capabilities::SUBGROUP;
    }
    capabilities
}

#[test]
fn every_shader_is_valid_with_its_variants_features_and_within_default_limits() {
    let mut checked = vec![0; Variant::ALL.len()];
    for g in shapes() {
        for (variant, checked) in Variant::ALL.iter().copied().zip(&mut checked) {
            if variant.supports(&g).is_err() {
                continue;
            }
            for pass in Pass::all(&g, variant) {
                let module = parse(pass, &g, variant);
                let mut validator =
                    naga::valid::Validator::new(naga::valid::ValidationFlags::all(), capabilities(variant));
                validator.subgroup_stages(naga::valid::ShaderStages::COMPUTE);
                validator.subgroup_operations(naga::valid::SubgroupOperationSet::all());
                validator.validate(&module).unwrap_or_else(|e| {
                    panic!("{pass:?}: {}", e.emit_to_string(pass.source(&g, variant).text()))
                });
                let mut workgroup_bytes = 0;
                let mut storage_buffers = 0;
                for (_, variable) in module.global_variables.iter() {
                    match variable.space {
                        naga::AddressSpace::WorkGroup => {
                            workgroup_bytes += module.types[variable.ty].inner.size(module.to_ctx());
                        }
                        naga::AddressSpace::Storage { .. } => storage_buffers += 1,
                        _ => {}
                    }
                }
                assert!(
                    workgroup_bytes <= 16384,
                    "{pass:?}, {g:?}: {workgroup_bytes} bytes of workgroup memory"
                );
                let declared = pass.workgroup_bytes(&g, variant);
                assert_eq!(workgroup_bytes, declared, "{pass:?} of {variant:?}, {:?}", g.layout);
                assert!(storage_buffers <= 8, "{pass:?}: {storage_buffers} storage buffers");
                let [x, y, z] = module.entry_points[0].workgroup_size;
                assert!(x * y * z <= 256, "{pass:?}: {x} invocations");
                *checked += 1;
            }
        }
    }
    assert!(checked[0] > 500 && checked[1..].iter().all(|n| *n > 50), "{checked:?}");
}

/// Identifiers in capitals of a shader's code, and those of them that it defines.
fn constants(text: &str) -> [BTreeSet<String>; 2] {
    let code: String = text.lines().map(|line| line.split("//").next().unwrap_or_default()).fold(
        String::new(),
        |mut code, line| {
            code.push_str(line);
            code.push('\n');
            code
        },
    );
    let words: Vec<&str> = code.split(|c: char| !(c.is_alphanumeric() || c == '_')).collect();
    let in_capitals = |word: &&str| {
        let letters = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
        word.len() > 1 && word.starts_with(|c: char| c.is_ascii_uppercase()) && word.chars().all(letters)
    };
    let used = words.iter().filter(|word| in_capitals(word)).map(|word| word.to_string()).collect();
    let words: Vec<&str> = words.into_iter().filter(|word| !word.is_empty()).collect();
    let defined =
        words.windows(2).filter(|pair| pair[0] == "const").map(|pair| pair[1].to_string()).collect();
    [used, defined]
}

/// What the head of a shader declares of a kind.
fn declared(text: &str, kind: &str) -> BTreeSet<String> {
    let head =
        text.lines().take_while(|line| line.starts_with("//")).map(|line| line.trim_start_matches('/'));
    let head = head.map(str::trim).collect::<Vec<_>>().join(" ");
    let list = head.split_once(kind).map_or("", |(_, list)| list);
    let list = list.split_once('.').map_or("", |(list, _)| list);
    list.split(", ").filter(|name| !name.is_empty()).map(str::to_string).collect()
}

/// The constant that comes with a record: its words.
fn words_of(record: &str) -> String {
    let letters = record.chars().enumerate().flat_map(|(at, c)| {
        let gap = (c.is_ascii_uppercase() && at > 0).then_some('_');
        gap.into_iter().chain([c.to_ascii_uppercase()])
    });
    letters.collect::<String>() + "_WORDS"
}

/// A prelude has what the heads of its files name. So they name what the files read, and nothing else.
#[test]
fn the_heads_of_shaders_name_the_constants_that_they_read() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for folder in ["shaders", "shaders/lib"] {
        for entry in std::fs::read_dir(root.join(folder)).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "wgsl") {
                files.push((path.display().to_string(), std::fs::read_to_string(&path).unwrap()));
            }
        }
    }
    let everywhere: BTreeSet<String> =
        files.iter().flat_map(|(_, text)| constants(text)[1].clone()).collect();
    for (path, text) in &files {
        let [used, _] = constants(text);
        let records = declared(text, "Records: ");
        let of_records = records.iter().map(|record| words_of(record)).collect();
        let read: BTreeSet<String> = used.difference(&everywhere).cloned().collect();
        let read: BTreeSet<String> = read.difference(&of_records).cloned().collect();
        assert_eq!(declared(text, "Constants: "), read, "{path} should say: Constants: {read:?}");
        let code: String = text.lines().filter(|line| !line.starts_with("//")).collect();
        for record in records {
            let reader = words_of(&record).to_lowercase().replace("_words", "_at(");
            assert!(code.contains(&record) || code.contains(&reader), "{path} reads no {record}");
        }
    }
}

/// The Rust that a kernel is tested against is there, and the head of its shader names it.
#[test]
fn every_kernel_has_a_twin() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    for g in shapes().iter().step_by(9) {
        for &variant in Variant::ALL.iter().filter(|variant| variant.supports(g).is_ok()) {
            for pass in Pass::all(g, variant) {
                let twin = pass.twin(g, variant);
                assert!(root.join(twin).is_file(), "{twin}");
                let file = format!("shaders/{}.wgsl", pass.source(g, variant).file());
                let text = std::fs::read_to_string(root.join(&file)).unwrap();
                assert!(text.contains(twin), "{file} should name {twin}");
            }
        }
    }
}

/// Variables of functions that are declared without an initial value, by line.
fn without_initializer(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (n, line) in (1..).zip(text.lines()) {
        let code = line.split("//").next().unwrap_or_default();
        for (at, _) in code.match_indices("var") {
            let is_word = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
            let rest = &code[at + 3..];
            if is_word(code[..at].chars().last()) || is_word(rest.chars().next()) {
                continue;
            }
            let is_global = ["workgroup", "storage", "uniform", "private"]
                .iter()
                .any(|space| rest.trim_start().starts_with(&format!("<{space}")));
            // No type that a function's variable can have contains one of these.
            let end = rest.find(['=', ';']);
            if !is_global && end.is_none_or(|end| rest[end..].starts_with(';')) {
                found.push((n, line.trim().to_string()));
            }
        }
    }
    found
}

/// Chromium's Tint (156, Vulkan) zeroes a variable without an initial value in a loop only the first time
/// round, as naga before 30 did; so every variable has one.
#[test]
fn every_variable_of_a_function_has_an_initial_value() {
    let planted = [
        "var<workgroup> sh: array<u32, 4>;",
        "fn f() {",
        "    for (var i = 0u; i < 4u; i++) {",
        "        var part: Logits;",
        "        var<function> q : vec4<f32> ; // var x = 1;",
        "        var right = 0.0; var wrong: array<f32, 4>;",
        "        let variable = var_of(right);",
        "    }",
        "}",
    ]
    .join("\n");
    let lines: Vec<usize> = without_initializer(&planted).into_iter().map(|(line, _)| line).collect();
    assert_eq!(lines, [4, 5, 6]);

    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut read = 0;
    for folder in ["shaders", "shaders/lib", "examples/llama/shaders"] {
        for entry in std::fs::read_dir(root.join(folder)).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "wgsl") {
                let text = std::fs::read_to_string(&path).unwrap();
                let found = without_initializer(&text);
                assert!(found.is_empty(), "{}: `= TYPE()` is missing: {found:?}", path.display());
                read += 1;
            }
        }
    }
    assert!(read > 60, "{read} shaders");
}

/// (name, offset) of each member of a struct in a shader, and its size.
fn members(module: &naga::Module, name: &str) -> (Vec<(String, u32)>, u32) {
    let (_, ty) = module.types.iter().find(|(_, t)| t.name.as_deref() == Some(name)).unwrap();
    let naga::TypeInner::Struct { members, span } = &ty.inner else { panic!("{name} is no struct") };
    (members.iter().map(|m| (m.name.clone().unwrap(), m.offset)).collect(), *span)
}

#[test]
fn host_structs_match_the_shaders() {
    let g = &shapes()[0];
    macro_rules! check {
        ($module:expr, $shader:literal, $host:ty, $($field:ident),*) => {
            let expected = vec![$((stringify!($field).to_string(), offset_of!($host, $field) as u32)),*];
            assert_eq!(members(&$module, $shader), (expected, size_of::<$host>() as u32), $shader);
        };
    }
    let module = parse(Pass::Append, g, Variant::Portable);
    check!(
        module,
        "PassParams",
        PassParams,
        first,
        count,
        tiles,
        slots,
        first_head,
        heads,
        sliding_window,
        soft_cap
    );
    check!(module, "View", ViewParams, offset, token_stride, head_stride, dtype);
    check!(module, "Io", IoParams, k, v, q, out, sinks, lse);
}

/// The table of shaders/README.md, as `| pass | group | binding | name | access |` rows.
fn documented() -> Vec<String> {
    let readme = include_str!("../../shaders/README.md");
    readme.lines().filter(|l| l.starts_with("| `")).map(str::to_string).collect()
}

#[test]
fn the_readme_lists_every_binding() {
    let g =
        shapes().into_iter().find(|g| g.layout.head_dim == 64 && g.layout.keys.bits == Bits::Two).unwrap();
    let mut actual: Vec<String> = Vec::new();
    // What is rotated has passes of its own.
    let config = CacheConfig::new(1, 1, 1, 64);
    let rotated =
        config.clone().with_formats(config.format.keys.with_rotation(), config.format.values.with_rotation());
    let rotated = Shape::new(&rotated).unwrap();
    let shapes = Variant::ALL.iter().map(|v| (*v, &g)).chain([(Variant::Portable, &rotated)]);
    for (variant, g) in shapes {
        variant.supports(g).unwrap();
        let small = |p: &Pass| !matches!(p, Pass::Decode(_, rows) | Pass::Merge(rows) if *rows > 1);
        for pass in Pass::all(g, variant).into_iter().filter(small) {
            let module = parse(pass, g, variant);
            let mut rows = Vec::new();
            for (_, variable) in module.global_variables.iter() {
                let Some(binding) = &variable.binding else { continue };
                let access = match variable.space {
                    naga::AddressSpace::Uniform => "uniform",
                    naga::AddressSpace::Storage { access } if access.contains(naga::StorageAccess::STORE) => {
                        "write"
                    }
                    _ => "read",
                };
                let name = variable.name.as_deref().unwrap();
                let file = pass.source(g, variant).file();
                let (group, binding) = (binding.group, binding.binding);
                rows.push((
                    group,
                    binding,
                    format!("| `{file}` | {group} | {binding} | `{name}` | {access} |"),
                ));
            }
            rows.sort();
            // Passes that variants share are listed once.
            actual.extend(rows.into_iter().map(|r| r.2).filter(|r| !actual.contains(r)).collect::<Vec<_>>());
        }
    }
    assert_eq!(documented(), actual, "shaders/README.md should list:\n{}", actual.join("\n"));
}
