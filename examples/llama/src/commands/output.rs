//! What commands print and save: a pipe that is closed is no error, and a file is there whole or as it was.

use anyhow::{Context as _, Result};
use llama::complain;
use std::fmt::Arguments;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// As `println!`, with an error in the place of a panic where nobody reads any more.
macro_rules! say {
    ($($what:tt)*) => { $crate::commands::output::show(format_args!("{}\n", format_args!($($what)*)))? };
}
pub(super) use say;

/// Prints at once.
pub fn show(what: Arguments<'_>) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_fmt(what)?;
    Ok(out.flush()?)
}

/// Whether an error says that nobody reads what is printed.
pub fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .any(|e| e.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == ErrorKind::BrokenPipe))
}

/// Prints in a talk, which goes on where this fails for another reason than that nobody reads.
pub fn tell(what: Arguments<'_>) -> Result<()> {
    match show(what) {
        Err(error) if !is_closed_pipe(&error) => {
            complain(format_args!("{error:#}"));
            Ok(())
        }
        other => other,
    }
}

/// Writes a file beside its place and renames it: whatever fails, what was there stays. A file that is there
/// keeps its permissions, and a link to it stays a link.
pub fn write_file(path: &Path, content: &[u8]) -> Result<()> {
    let write = || -> std::io::Result<()> {
        let known = std::fs::metadata(path).ok();
        let path = if known.is_some() { path.canonicalize()? } else { path.to_path_buf() };
        if known.as_ref().is_some_and(|known| !known.is_file()) {
            return Err(std::io::Error::new(ErrorKind::InvalidInput, "something else than a file is there"));
        }
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let mut builder = tempfile::Builder::new();
        builder.prefix(".").suffix(".new");
        #[cfg(unix)]
        {
            // As any other file; the process's mask applies.
            use std::os::unix::fs::PermissionsExt;
            builder.permissions(std::fs::Permissions::from_mode(0o666));
        }
        let mut file = builder.tempfile_in(folder)?;
        if let Some(known) = known {
            file.as_file().set_permissions(known.permissions())?;
        }
        file.write_all(content)?;
        file.as_file().sync_all()?;
        file.persist(path)?;
        Ok(())
    };
    write().with_context(|| format!("{}", path.display()))
}

/// Where results are saved.
#[derive(clap::Args)]
pub struct Output {
    /// The folder for tables and pictures; without it `llama` in the target folder.
    #[arg(long)]
    output: Option<PathBuf>,
}

impl Output {
    /// A file in it.
    fn path(&self, name: &str) -> Result<PathBuf> {
        let folder = self.output.clone().unwrap_or_else(|| crate::target().join("llama"));
        std::fs::create_dir_all(&folder).with_context(|| format!("{}", folder.display()))?;
        Ok(folder.join(name))
    }

    /// Saves a file.
    pub fn save(&self, name: &str, content: &str) -> Result<PathBuf> {
        let path = self.path(name)?;
        write_file(&path, content.as_bytes())?;
        Ok(path)
    }

    /// Saves a table, prints it, and saves a picture beside it and says where: nothing of it is lost where
    /// something else fails.
    pub fn publish(
        &self,
        name: &str,
        table: &str,
        picture: Option<impl FnOnce() -> Result<String>>,
    ) -> Result<()> {
        let saved = self.save(&format!("{name}.md"), table);
        let drawn = picture.map(|draw| self.save(&format!("{name}.svg"), &draw()?)).transpose();
        let shown = show(format_args!("{table}"));
        saved?;
        if let Some(path) = drawn?
            && shown.is_ok()
        {
            say!("\n{}", path.display());
        }
        shown
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_there_whole_or_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("table.md");
        write_file(&path, b"one").unwrap();
        write_file(&path, b"two").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"two");
        // A file keeps its permissions, and a link stays one.
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o664)).unwrap();
            let link = folder.path().join("link");
            std::os::unix::fs::symlink(&path, &link).unwrap();
            write_file(&link, b"two").unwrap();
            assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o664);
            assert!(link.symlink_metadata().unwrap().is_symlink());
            std::fs::remove_file(link).unwrap();
            let socket = folder.path().join("socket");
            let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
            let refused = write_file(&socket, b"two").unwrap_err();
            assert!(format!("{refused:#}").contains("something else than a file"), "{refused:#}");
            std::fs::remove_file(socket).unwrap();
        }
        // A folder stands where the file should.
        let blocked = folder.path().join("blocked");
        std::fs::create_dir_all(blocked.join("within")).unwrap();
        let error = write_file(&blocked, b"three").unwrap_err();
        assert!(format!("{error:#}").contains("blocked"), "{error:#}");
        // Nothing is left beside.
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
        let nowhere = write_file(&folder.path().join("none/table.md"), b"four").unwrap_err();
        assert!(!is_closed_pipe(&nowhere));
        assert!(is_closed_pipe(
            &anyhow::Error::new(std::io::Error::from(ErrorKind::BrokenPipe)).context("printing")
        ));
    }
}
