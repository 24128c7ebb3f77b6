//! SVG pictures, by plotters.

use anyhow::{Result, ensure};
use plotters::element::BitMapElement;
use plotters::prelude::*;

/// A map of numbers from 0 to 1, `[row][column]`.
pub struct Panel {
    pub title: String,
    pub cells: Vec<Vec<f64>>,
}

/// From dark to bright, as viridis does: https://bids.github.io/colormap/
fn colour(part: f64) -> RGBColor {
    let RGBColor(r, g, b) = ViridisRGB.get_color(part.clamp(0.0, 1.0));
    RGBColor(r, g, b)
}

/// Panels of few cells beside each other, each cell with its number.
pub fn heat_maps(title: &str, panels: &[Panel], columns: &[String], rows: &[String]) -> Result<String> {
    let mut svg = String::new();
    let (cell, left, top) = (64, 70, 70);
    let width = columns.len() as i32 * cell;
    let step = width + 30;
    // At least as wide as the title.
    let size = ((left + step * panels.len() as i32).max(440), top + rows.len() as i32 * cell + 40);
    let root = SVGBackend::with_string(&mut svg, (size.0 as u32, size.1 as u32)).into_drawing_area();
    root.fill(&WHITE)?;
    root.draw(&Text::new(title, (left, 8), ("sans-serif", 18)))?;
    for (index, panel) in panels.iter().enumerate() {
        let x = left + index as i32 * step;
        root.draw(&Text::new(panel.title.as_str(), (x, top - 22), ("sans-serif", 16)))?;
        for (row, cells) in panel.cells.iter().enumerate() {
            let y = top + row as i32 * cell;
            if index == 0 {
                root.draw(&Text::new(rows[row].as_str(), (12, y + cell / 2 - 7), ("sans-serif", 14)))?;
            }
            for (column, &part) in cells.iter().enumerate() {
                let at = x + column as i32 * cell;
                root.draw(&Rectangle::new(
                    [(at + 1, y + 1), (at + cell - 1, y + cell - 1)],
                    colour(part).filled(),
                ))?;
                let ink = if part > 0.6 { BLACK } else { WHITE };
                let number = format!("{:.0} %", 100.0 * part);
                root.draw(&Text::new(
                    number,
                    (at + 14, y + cell / 2 - 7),
                    ("sans-serif", 14).into_font().color(&ink),
                ))?;
            }
        }
        for (column, name) in columns.iter().enumerate() {
            let at = x + column as i32 * cell + 12;
            root.draw(&Text::new(name.as_str(), (at, size.1 - 32), ("sans-serif", 14)))?;
        }
    }
    root.present()?;
    drop(root);
    Ok(svg)
}

/// Panels of many cells, two in a row, each cell a few pixels of one bitmap.
pub fn bitmaps(title: &str, panels: &[Panel], x: &str, y: &str) -> Result<String> {
    let mut svg = String::new();
    let tall = panels.iter().map(|p| p.cells.len()).max().unwrap_or(1);
    let wide = panels.iter().map(|p| p.cells.first().map_or(0, Vec::len)).max().unwrap_or(1);
    let scale = (560 / wide).max(1);
    let (width, height) = ((wide * scale) as i32, tall as i32);
    let (left, top, step) = (40, 40, (width + 40, height + 60));
    let rows = panels.len().div_ceil(2) as i32;
    let size = ((left + 2 * step.0) as u32, (top + rows * step.1) as u32);
    let root = SVGBackend::with_string(&mut svg, size).into_drawing_area();
    root.fill(&WHITE)?;
    root.draw(&Text::new(title, (left, 8), ("sans-serif", 18)))?;
    for (index, panel) in panels.iter().enumerate() {
        let at = (left + index as i32 % 2 * step.0, top + index as i32 / 2 * step.1);
        root.draw(&Text::new(panel.title.as_str(), (at.0, at.1 + 2), ("sans-serif", 15)))?;
        let pixels: Vec<u8> = panel
            .cells
            .iter()
            .flat_map(|row| row.iter().flat_map(|&part| std::iter::repeat_n(colour(part), scale)))
            .flat_map(|RGBColor(r, g, b)| [r, g, b])
            .collect();
        let size = ((panel.cells[0].len() * scale) as u32, panel.cells.len() as u32);
        let bitmap = BitMapElement::with_owned_buffer((at.0, at.1 + 22), size, pixels);
        let Some(bitmap) = bitmap else { continue };
        root.draw(&bitmap)?;
        root.draw(&Text::new(x, (at.0, at.1 + 26 + height), ("sans-serif", 13)))?;
        let turned = ("sans-serif", 13).into_font().transform(FontTransform::Rotate270);
        root.draw(&Text::new(y, (at.0 - 18, at.1 + 22 + height), turned))?;
    }
    root.present()?;
    drop(root);
    // Plotters leaves out the kind of the data, which not every viewer guesses.
    Ok(svg.replace("data:png;base64", "data:image/png;base64"))
}

/// Named points: x is linear, y logarithmic. Those that are nowhere are left out.
pub fn points(title: &str, x: &str, y: &str, points: &[(String, f64, f64)]) -> Result<String> {
    let points: Vec<_> = points.iter().filter(|(_, x, y)| x.is_finite() && y.is_finite()).collect();
    ensure!(!points.is_empty(), "there is nothing to draw: no number is finite");
    let mut svg = String::new();
    let root = SVGBackend::with_string(&mut svg, (900, 560)).into_drawing_area();
    root.fill(&WHITE)?;
    let ends = |of: fn(&(String, f64, f64)) -> f64| {
        points
            .iter()
            .map(|point| of(point))
            .fold((f64::MAX, f64::MIN), |(low, high), v| (low.min(v), high.max(v)))
    };
    let ((left, right), (low, high)) = (ends(|p| p.1), ends(|p| p.2.max(1e-5)));
    let mut chart = ChartBuilder::on(&root)
        .margin(16)
        .caption(title, ("sans-serif", 20))
        .x_label_area_size(44)
        .y_label_area_size(72)
        .build_cartesian_2d(0.0..right * 1.25 + 0.1 * left, (low / 2.0..high * 2.0).log_scale())?;
    chart.configure_mesh().x_desc(x).y_desc(y).draw()?;
    for (index, (name, x, y)) in points.iter().enumerate() {
        let color = Palette99::pick(index).to_rgba();
        let at = (*x, y.max(1e-5));
        chart.draw_series([Circle::new(at, 5, color.filled())])?;
        chart.draw_series([EmptyElement::at(at) + Text::new(name.clone(), (9, -7), ("sans-serif", 14))])?;
    }
    root.present()?;
    drop(chart);
    drop(root);
    Ok(svg)
}
