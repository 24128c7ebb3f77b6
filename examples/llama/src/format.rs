//! Formats of the cache by name.

use anyhow::{Context, Result, bail};
use kivi_wgpu::{Axis, Bits, CacheConfig, LayerFormat, Preset, TensorFormat, ZeroPoint};
use std::str::FromStr;

/// What the commands say about formats.
pub const HELP: &str = "\
A format is a preset (kivi2, kivi4, bits2.25, bits2.75, bits3, bits4.5), 16, or a description: parts joined by '-'.
  kBITS, vBITS  keys and values in 2, 3, 4, 8 or 16 bits, with letters after it:
                c clipped, r rotated, p parameters in 16 bits, t grouped per token, h grouped per channel, z textbook zero point
  gN            groups of N (default 32)
  nN            groups of N channels, where they are per token
  wN            a window of N (default 128)
  sN            N sink tokens (default 0)
  lN            only the last N tokens are kept
A preset's parts can be changed: bits3-w64. Layers get a format of their own after '+': bits2.25+0/29=bits4.5";

/// A format and its name.
#[derive(Debug, Clone, PartialEq)]
pub struct Format {
    pub name: String,
    format: LayerFormat,
    own: Vec<(Vec<u32>, LayerFormat)>,
}

impl Format {
    /// The configuration with this format.
    pub fn apply(&self, config: CacheConfig) -> CacheConfig {
        let mut config = config.with_format(self.format);
        // Sinks are there from the beginning.
        let sinks = self.own.iter().map(|(_, format)| format).chain([&self.format]).map(|f| f.sink_tokens);
        config.capacity = sinks.fold(config.capacity, u32::max);
        self.own.iter().fold(config, |config, (layers, format)| {
            config.with_layer_format(layers.iter().copied(), *format)
        })
    }

    /// 16 bits, which others are compared with, and the others.
    pub fn after_sixteen(formats: &[Format]) -> Result<Vec<Format>> {
        let sixteen: Format = "16".parse()?;
        let others = formats.iter().filter(|format| **format != sixteen).cloned();
        Ok([sixteen.clone()].into_iter().chain(others).collect())
    }
}

impl FromStr for Format {
    type Err = anyhow::Error;

    fn from_str(name: &str) -> Result<Format> {
        let mut parts = name.split('+');
        let format = layer_format(parts.next().unwrap_or_default())?;
        let own = |part: &str| -> Result<_> {
            let (layers, format) =
                part.split_once('=').with_context(|| format!("{part}: LAYERS=FORMAT is expected"))?;
            let layers: Result<Vec<u32>, _> = layers.split('/').map(str::parse).collect();
            Ok((layers.with_context(|| format!("{part}: layers are numbers"))?, layer_format(format)?))
        };
        Ok(Format { name: name.to_string(), format, own: parts.map(own).collect::<Result<_>>()? })
    }
}

fn layer_format(name: &str) -> Result<LayerFormat> {
    let mut format = LayerFormat::default();
    for (index, part) in name.split('-').enumerate() {
        let preset = match part.to_lowercase().as_str() {
            "kivi2" => Some(Preset::Kivi2),
            "kivi4" => Some(Preset::Kivi4),
            "bits2.25" => Some(Preset::Bits2_25),
            "bits2.75" => Some(Preset::Bits2_75),
            "bits3" => Some(Preset::Bits3),
            "bits4.5" => Some(Preset::Bits4_5),
            _ => None,
        };
        if let (0, Some(preset)) = (index, preset) {
            format = preset.format();
            continue;
        }
        if let (0, "16") = (index, part) {
            (format.keys, format.values) =
                (TensorFormat::new(Bits::Sixteen), TensorFormat::new(Bits::Sixteen));
            continue;
        }
        let mut characters = part.chars();
        let kind = characters.next().unwrap_or(' ');
        let rest = characters.as_str();
        let number =
            || rest.parse::<u32>().with_context(|| format!("{part} in the format {name}: no number\n{HELP}"));
        match kind {
            'k' => format.keys = tensor(rest, name)?,
            'v' => format.values = tensor(rest, name)?,
            'g' => format.group_size = number()?,
            'n' => format.value_group_size = Some(number()?),
            'w' => format.residual_window = number()?,
            's' => format.sink_tokens = number()?,
            'l' => format.history_limit = Some(number()?),
            _ => bail!("{part} in the format {name} is not known\n{HELP}"),
        }
    }
    Ok(format)
}

fn tensor(part: &str, name: &str) -> Result<TensorFormat> {
    let letters = part.trim_start_matches(|c: char| c.is_ascii_digit());
    let width = &part[..part.len() - letters.len()];
    let bits = Bits::ALL.iter().copied().find(|bits| bits.get().to_string() == width);
    let bits = bits.with_context(|| format!("{part} in the format {name}: no width\n{HELP}"))?;
    letters.chars().try_fold(TensorFormat::new(bits), |format, letter| {
        Ok(match letter {
            'c' => format.with_clipping(),
            'r' => format.with_rotation(),
            'p' => format.with_compact_parameters(),
            't' => format.with_axis(Axis::PerToken),
            'h' => format.with_axis(Axis::PerChannel),
            'z' => format.with_zero_point(ZeroPoint::Rounded),
            _ => bail!("{part} in the format {name}: {letter} is not known\n{HELP}"),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_can_be_described() {
        let format = |name: &str| name.parse::<Format>().unwrap().format;
        assert_eq!(format("k2-v2"), Preset::Kivi2.format());
        assert_eq!(format("k3-v2rc-g64-s4"), Preset::Bits3.format());
        assert_eq!(format("k2cp-v2rcp-g64-s4"), Preset::Bits2_25.format());
        assert_eq!(format("bits2.25-w64").residual_window, 64);
        for wrong in ["", "k5", "k2x", "g", "bits9", "bits3+4", "bits3+a=16"] {
            assert!(wrong.parse::<Format>().is_err(), "{wrong}");
        }
        let mixed: Format = "bits2.25+0/29=bits4.5".parse().unwrap();
        let config = mixed.apply(CacheConfig::new(30, 9, 3, 64));
        assert_eq!(config.format_of(29), Preset::Bits4_5.format());
        assert_eq!(config.format_of(1), Preset::Bits2_25.format());
        let formats = ["kivi2", "16", "bits3"].map(|name| name.parse::<Format>().unwrap());
        let names: Vec<_> = Format::after_sixteen(&formats).unwrap().into_iter().map(|f| f.name).collect();
        assert_eq!(names, ["16", "kivi2", "bits3"]);
    }
}
