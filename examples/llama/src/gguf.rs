//! GGUF files: their metadata by type and range, and their tensors. Parsing and dequantizing are candle's.

use anyhow::{Context, Result, bail, ensure};
use candle_core::Device;
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::{Content, Value};
use half::f16;
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

/// An open file, its header read and its tensors known to be there.
pub struct Gguf {
    content: Content,
    file: BufReader<File>,
    path: PathBuf,
}

/// The rows of a matrix `[rows][columns]`, as the kernels multiply it.
#[derive(Debug, Clone, PartialEq)]
pub enum Weights {
    /// Blocks of 32 columns: a word with scale (low half) and minimum in f16, then 16 bytes; byte j holds
    /// columns j (low nibble) and j + 16.
    Four(Vec<u32>),
    /// f16, two columns to a word.
    Sixteen(Vec<u32>),
}

impl Gguf {
    /// Opens a file, and checks that all of its tensors are within it.
    pub fn open(path: &Path) -> Result<Gguf> {
        let file = File::open(path).with_context(|| {
            format!("{}: `cargo xtask model` fetches one, --model takes a path", path.display())
        })?;
        let mut file = BufReader::new(file);
        check_alignment(&mut file).with_context(|| format!("{}", path.display()))?;
        let content = Content::read(&mut file).map_err(|error| {
            // What is only unknown is as it should be.
            let error = anyhow::Error::from(error);
            let unknown = ["unknown dtype", "unsupported"];
            let why = match unknown.iter().any(|what| error.to_string().contains(what)) {
                true => "a kind of file or of tensor that this example cannot read",
                false => "this is no GGUF file, or its header was cut or altered: fetch it again",
            };
            error.context(format!("{}: {why}", path.display()))
        })?;
        let length = file.seek(SeekFrom::End(0))?;
        let gguf = Gguf { content, file, path: path.to_path_buf() };
        gguf.check_extents(length).with_context(|| format!("{}", path.display()))?;
        Ok(gguf)
    }

    /// Whether every tensor has a possible shape and lies within the file.
    fn check_extents(&self, length: u64) -> Result<()> {
        let mut tensors: Vec<_> = self.content.tensor_infos.iter().collect();
        tensors.sort_by_key(|(name, info)| (info.offset, name.as_str()));
        for (name, info) in tensors {
            let (dims, dtype) = (info.shape.dims(), info.ggml_dtype);
            let blocks = || {
                let elements = dims.iter().try_fold(1u64, |n, &dim| n.checked_mul(dim as u64))?;
                let block = dtype.block_size() as u64;
                (elements > 0 && elements.is_multiple_of(block)).then_some(elements / block)
            };
            let end = blocks()
                .and_then(|blocks| blocks.checked_mul(dtype.type_size() as u64))
                .and_then(|bytes| bytes.checked_add(self.content.tensor_data_offset))
                .and_then(|end| end.checked_add(info.offset));
            let Some(end) = end else {
                bail!(
                    "the tensor {name} has the impossible shape {dims:?} of {dtype:?}: fetch the file again"
                );
            };
            if end > length {
                bail!(
                    "the file was cut: it has {length} bytes, and the tensor {name} ends at {end}: fetch it again"
                );
            }
        }
        Ok(())
    }

    fn value(&self, key: &str) -> Option<&Value> {
        self.content.metadata.get(key)
    }

    /// A string of the metadata, if there is one.
    pub fn string(&self, key: &str) -> Result<Option<&str>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => bail!("{key} is {}, a text is expected", kind(other)),
        }
    }

    /// A number of the metadata that is whole and within a range, if there is one. Files disagree on its
    /// width.
    pub fn whole(&self, key: &str, range: RangeInclusive<u32>) -> Result<Option<u32>> {
        self.value(key).map(|value| whole(key, value, &range)).transpose()
    }

    /// The same where there must be one.
    pub fn needed(&self, key: &str, range: RangeInclusive<u32>) -> Result<u32> {
        self.whole(key, range)?.with_context(|| format!("the file has no {key}"))
    }

    /// The same, written once or for each of so many layers, which must agree.
    pub fn of_layers(&self, key: &str, layers: u32, range: RangeInclusive<u32>) -> Result<Option<u32>> {
        let Some(Value::Array(list)) = self.value(key) else { return self.whole(key, range) };
        ensure!(list.len() == layers as usize, "{key} has {} entries for {layers} layers", list.len());
        let mut numbers = list.iter().map(|value| whole(key, value, &range));
        let first = numbers.next().transpose()?;
        for number in numbers {
            if Some(number?) != first {
                bail!("{key} differs from layer to layer, which is not supported");
            }
        }
        Ok(first)
    }

    /// A number of the metadata that is finite and larger than `above`, and at most `most`, if there is one.
    pub fn real(&self, key: &str, above: f64, most: f64) -> Result<Option<f64>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let number = match value {
            Value::F32(x) => f64::from(*x),
            Value::F64(x) => *x,
            other => integer(other)
                .with_context(|| format!("{key} is {}, a number is expected", kind(other)))?
                as f64,
        };
        // A NaN is in no range.
        ensure!(
            number > above && number <= most,
            "{key} = {number} is not supported: more than {above}, at most {most}"
        );
        Ok(Some(number))
    }

    /// Yes or no, if the metadata say so.
    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(other) => bail!("{key} is {}, true or false is expected", kind(other)),
        }
    }

    /// A list of the metadata, its entries read by `read`, if there is one.
    pub fn list<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<Vec<T>>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Array(list)) => {
                let entries = list.iter().enumerate().map(|(at, value)| {
                    read(value).with_context(|| {
                        format!("entry {at} of {key} is {}, {expected} is expected", kind(value))
                    })
                });
                entries.collect::<Result<_>>().map(Some)
            }
            Some(other) => bail!("{key} is {}, a list is expected", kind(other)),
        }
    }

    /// A list of strings that must be there.
    pub fn texts(&self, key: &str) -> Result<Vec<String>> {
        let text = |value: &Value| value.to_string().ok().cloned();
        self.list(key, "a text", text)?.with_context(|| format!("the file has no {key}"))
    }

    /// How many entries a list has that must be there.
    pub fn length(&self, key: &str) -> Result<u32> {
        match self.value(key).with_context(|| format!("the file has no {key}"))? {
            Value::Array(list) => Ok(u32::try_from(list.len())?),
            other => bail!("{key} is {}, a list is expected", kind(other)),
        }
    }

    pub fn has(&self, tensor: &str) -> bool {
        self.content.tensor_infos.contains_key(tensor)
    }

    /// Where an error is from.
    fn within(&self, tensor: &str) -> String {
        format!("{}: the tensor {tensor}", self.path.display())
    }

    /// A tensor of so many numbers, in f32.
    pub fn floats(&mut self, name: &str, count: u32) -> Result<Vec<f32>> {
        let within = self.within(name);
        let tensor = self.tensor(name)?;
        let shape = tensor.shape();
        ensure!(
            shape.elem_count() == count as usize,
            "{within} has the shape {shape:?}, {count} numbers are expected"
        );
        let values: Vec<f32> = tensor.dequantize(&Device::Cpu)?.flatten_all()?.to_vec1()?;
        ensure!(
            values.iter().all(|x| x.is_finite()),
            "{within} has numbers that are not finite: fetch the file again"
        );
        Ok(values)
    }

    fn tensor(&mut self, name: &str) -> Result<candle_core::quantized::QTensor> {
        ensure!(self.has(name), "{}: the file has no tensor {name}", self.path.display());
        let tensor = self.content.tensor(&mut self.file, name, &Device::Cpu);
        tensor.with_context(|| self.within(name))
    }

    /// The rows of several matrices with so many columns, one after the other: in 4 bits if all of them are
    /// blocks of 4 bits, else in f16.
    pub fn rows(&mut self, names: &[String], columns: u32) -> Result<Weights> {
        let mut tensors = Vec::with_capacity(names.len());
        for name in names {
            let tensor = self.tensor(name)?;
            match tensor.shape().dims() {
                [_, width] if *width == columns as usize => tensors.push(tensor),
                other => {
                    bail!(
                        "{} has the shape {other:?}, rows of {columns} columns are expected",
                        self.within(name)
                    )
                }
            }
        }
        if tensors.iter().all(|t| matches!(t.dtype(), GgmlDType::Q4_0 | GgmlDType::Q4_1)) {
            let mut words = Vec::new();
            for (tensor, name) in tensors.iter().zip(names) {
                let bytes = tensor.data()?;
                let (size, zero) =
                    if tensor.dtype() == GgmlDType::Q4_1 { (20, None) } else { (18, Some(8.0)) };
                let first = words.len();
                words.extend(bytes.chunks_exact(size).flat_map(|block| four_bit_block(block, zero)));
                // Scale and minimum of every block.
                let mut parameters = words[first..].iter().step_by(5).flat_map(|word| [*word, word >> 16]);
                self.check_finite(name, parameters.all(|bits| bits & 0x7c00 != 0x7c00))?;
            }
            return Ok(Weights::Four(words));
        }
        let mut words = Vec::new();
        for (tensor, name) in tensors.iter().zip(names) {
            let values: Vec<f32> = tensor.dequantize(&Device::Cpu)?.flatten_all()?.to_vec1()?;
            self.check_finite(name, values.iter().all(|x| f16::from_f32(*x).is_finite()))?;
            words.extend(values.chunks_exact(2).map(|pair| {
                let half = |x: f32| u32::from(f16::from_f32(x).to_bits());
                half(pair[0]) | half(pair[1]) << 16
            }));
        }
        Ok(Weights::Sixteen(words))
    }

    fn check_finite(&self, tensor: &str, finite: bool) -> Result<()> {
        let within = self.within(tensor);
        ensure!(finite, "{within} has weights that are no numbers of 16 bits: fetch the file again");
        Ok(())
    }
}

/// Refuses a file that aligns its tensors to multiples of 0, by which candle would divide.
fn check_alignment(file: &mut BufReader<File>) -> Result<()> {
    let key = "general.alignment";
    // Longer than a header is: a vocabulary of 256 thousand words takes 8 MiB.
    let mut header = Vec::new();
    file.by_ref().take(32 << 20).read_to_end(&mut header)?;
    file.rewind()?;
    let length = key.len() as u32;
    for at in (0..header.len()).filter(|at| header[*at..].starts_with(key.as_bytes())) {
        // A key follows its length, in 8 bytes, or 4 in the oldest files.
        let is_key = header[..at].ends_with(&u64::from(length).to_le_bytes())
            || header[..at].ends_with(&length.to_le_bytes());
        // Its type in 4 bytes, its value in 1, 2 or 4.
        let entry = &header[at + key.len()..];
        let value = match entry.first() {
            Some(0 | 1) => entry.get(4..5),
            Some(2 | 3) => entry.get(4..6),
            Some(4 | 5) => entry.get(4..8),
            _ => None,
        };
        let zero = value.is_some_and(|value| value.iter().all(|byte| *byte == 0));
        ensure!(!(is_key && zero), "{key} = 0: fetch the file again");
    }
    Ok(())
}

fn whole(key: &str, value: &Value, range: &RangeInclusive<u32>) -> Result<u32> {
    let number =
        integer(value).with_context(|| format!("{key} is {}, a whole number is expected", kind(value)))?;
    let fits = u32::try_from(number).ok().filter(|number| range.contains(number));
    fits.with_context(|| format!("{key} = {number} is not supported: {} to {}", range.start(), range.end()))
}

/// A whole number of whatever width.
pub fn integer(value: &Value) -> Option<i128> {
    Some(match value {
        Value::U8(x) => (*x).into(),
        Value::I8(x) => (*x).into(),
        Value::U16(x) => (*x).into(),
        Value::I16(x) => (*x).into(),
        Value::U32(x) => (*x).into(),
        Value::I32(x) => (*x).into(),
        Value::U64(x) => (*x).into(),
        Value::I64(x) => (*x).into(),
        _ => return None,
    })
}

/// What a value is, for messages.
fn kind(value: &Value) -> String {
    match value {
        Value::String(text) => format!("the text {:?}", text.chars().take(40).collect::<String>()),
        Value::Array(list) => format!("a list of {}", list.len()),
        Value::F32(x) => format!("the number {x}"),
        Value::F64(x) => format!("the number {x}"),
        Value::Bool(x) => x.to_string(),
        other => integer(other).map_or_else(|| format!("{other:?}"), |x| format!("the number {x}")),
    }
}

/// The five words of a Q4_1 block (scale, minimum, 16 bytes), or of a Q4_0 block (scale, 16 bytes), whose
/// minimum is `-zero` scales.
fn four_bit_block(block: &[u8], zero: Option<f32>) -> [u32; 5] {
    let half = |at: usize| u32::from(u16::from_le_bytes([block[at], block[at + 1]]));
    let minimum = match zero {
        None => half(2),
        Some(zero) => {
            let scale = f16::from_bits(half(0) as u16).to_f32();
            u32::from(f16::from_f32(-zero * scale).to_bits())
        }
    };
    let codes = &block[block.len() - 16..];
    let word = |w: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| codes[4 * w + byte]));
    [half(0) | minimum << 16, word(0), word(1), word(2), word(3)]
}
