//! The command that runs PROGRAM.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::Access;

use crate::cli::usage::Usage;
use crate::job::{Program, ProgramKind};

/// Makes the command for PROGRAM and its arguments. A path is used as it is; a name is searched
/// beside flow-launch and then on PATH. What only Python can run (which may also be a name in the
/// current folder) runs with `python3 -u`, or with PYTHON_EXEC.
pub fn command(program: &Program) -> Result<Vec<OsString>, Usage> {
    let mut command = Places::this().command(program.kind, &program.name)?;
    command.extend_from_slice(&program.arguments);
    Ok(command)
}

/// Returns the interpreter for Python that flow-launch itself runs, in behalf of `user`.
pub fn python(user: &str) -> Result<OsString, Usage> {
    Places::this().python(OsStr::new(user))
}

/// Says how to start a program that has the name of this subcommand, if there is one.
pub fn note_namesake(subcommand: &str) {
    let name = OsString::from(subcommand);
    let program = Program { kind: ProgramKind::Executable, name, arguments: Vec::new() };
    if let Ok(command) = command(&program) {
        let path = command[0].display();
        eprintln!(
            "flow-launch: {subcommand} is a command of flow-launch; to start {path} write \
             flow-launch -- {subcommand}"
        );
    }
}

/// Whether PROGRAM is Python, or Python runs it.
pub fn is_python(program: &Program) -> bool {
    let path = Path::new(&program.name);
    let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
    let version = name.strip_prefix("python");
    let is_python =
        version.is_some_and(|version| version.chars().all(|c| c.is_ascii_digit() || c == '.'));
    match program.kind {
        ProgramKind::Module | ProgramKind::Script => true,
        ProgramKind::ByName => is_python || is_pythons(path),
        ProgramKind::Executable => is_python,
    }
}

struct Places {
    beside: Option<PathBuf>,
    path: Vec<PathBuf>,
    /// The interpreter, if it is not `python3`.
    python: Option<OsString>,
}

impl Places {
    /// Those of this process.
    fn this() -> Places {
        let launcher = std::env::current_exe().ok();
        let path = std::env::var_os("PATH").unwrap_or_default();
        Places {
            beside: launcher.and_then(|launcher| launcher.parent().map(Path::to_path_buf)),
            path: std::env::split_paths(&path).collect(),
            python: std::env::var_os("PYTHON_EXEC").filter(|python| !python.is_empty()),
        }
    }

    fn command(&self, kind: ProgramKind, name: &OsStr) -> Result<Vec<OsString>, Usage> {
        match kind {
            ProgramKind::Module => {
                Ok(vec![self.python(name)?, "-u".into(), "-m".into(), name.into()])
            }
            ProgramKind::Script => self.script(name),
            ProgramKind::ByName if is_pythons(Path::new(name)) => self.script(name),
            ProgramKind::ByName | ProgramKind::Executable => Ok(vec![self.program(name)?]),
        }
    }

    fn script(&self, name: &OsStr) -> Result<Vec<OsString>, Usage> {
        let script = if Path::new(name).exists() {
            name.to_owned()
        } else {
            self.find(name, Path::is_file, " nor in the current folder")?
        };
        Ok(vec![self.python(name)?, "-u".into(), script])
    }

    /// Finds the interpreter for a script or a module.
    fn python(&self, program: &OsStr) -> Result<OsString, Usage> {
        let program = program.display();
        let Some(python) = &self.python else {
            let found = self.on_path(OsStr::new("python3")).map(OsString::from);
            return found.ok_or_else(|| {
                Usage(format!(
                    "{program} needs python3, which is not on PATH; or name another by PYTHON_EXEC"
                ))
            });
        };
        let is_path = python.as_bytes().contains(&b'/');
        let found = if is_path {
            Some(python.into()).filter(|path: &PathBuf| is_executable(path))
        } else {
            self.on_path(python)
        };
        let python = python.display();
        found.map(OsString::from).ok_or_else(|| {
            Usage(format!(
                "PYTHON_EXEC is '{python}'; for {program} it must be an interpreter, by path or \
                 by name on PATH"
            ))
        })
    }

    fn program(&self, program: &OsStr) -> Result<OsString, Usage> {
        let name = program.display();
        let hint = match Path::new(program) {
            here if is_executable(here) => format!("; for the file here write ./{name}"),
            here if here.is_file() => {
                format!("; if the file here is Python's, write --run-path {name}")
            }
            _ => "; give its path".into(),
        };
        let found = self.find(program, is_executable, &hint)?;
        let path = Path::new(&found);
        if path.is_dir() {
            let advice = if is_pythons(path) {
                "; for Python to run it, leave --no-python out"
            } else {
                ", and has no __main__.py to run"
            };
            return Err(Usage(format!("{} is a folder{advice}", path.display())));
        }
        if !is_executable(path) {
            let path = path.display();
            return Err(Usage(format!(
                "{path} is not executable; chmod +x it, or, if it is Python's, --run-path {path}"
            )));
        }
        Ok(found)
    }

    /// Finds a program; `more` is added to the error about a name that is not found.
    fn find(
        &self,
        program: &OsStr,
        fits: impl Fn(&Path) -> bool,
        more: &str,
    ) -> Result<OsString, Usage> {
        let name = program.display();
        if program.as_bytes().contains(&b'/') {
            if Path::new(program).exists() {
                return Ok(program.to_owned());
            }
            return Err(Usage(format!("no program {name}: there is no such file")));
        }
        let folders = self.beside.iter().chain(&self.path);
        if let Some(found) = folders.map(|folder| folder.join(program)).find(|path| fits(path)) {
            return Ok(found.into());
        }
        let beside = self.beside.as_deref().unwrap_or(Path::new("?")).display();
        Err(Usage(format!(
            "no program {name}: neither beside flow-launch ({beside}) nor on PATH{more}"
        )))
    }

    fn on_path(&self, name: &OsStr) -> Option<PathBuf> {
        self.path.iter().map(|folder| folder.join(name)).find(|path| is_executable(path))
    }
}

/// Whether only Python runs it: a script, a program in one file (zipapp), compiled code, a folder
/// of a program.
fn is_pythons(path: &Path) -> bool {
    let extension = path.extension().and_then(OsStr::to_str);
    matches!(extension, Some("py" | "pyz" | "pyc")) || path.join("__main__.py").is_file()
}

fn is_executable(path: &Path) -> bool {
    path.is_file() && rustix::fs::access(path, Access::EXEC_OK).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    fn file(folder: &Path, name: &str, mode: u32) -> PathBuf {
        let path = folder.join(name);
        fs::write(&path, "").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    #[test]
    fn what_is_python() {
        let is_python =
            |kind, name: &str| is_python(&Program { kind, name: name.into(), arguments: vec![] });
        for name in ["train.py", "app.pyz", "python3", "/opt/bin/python3.12"] {
            assert!(is_python(ProgramKind::ByName, name), "{name}");
        }
        for name in ["train", "pythonic", "./python-app"] {
            assert!(
                !is_python(ProgramKind::ByName, name) && is_python(ProgramKind::Module, name),
                "{name}"
            );
        }
        assert!(
            !is_python(ProgramKind::Executable, "train.py")
                && is_python(ProgramKind::Executable, "python")
        );
    }

    #[test]
    fn order_of_places() {
        let (beside, early, late) = (
            tempfile::tempdir().unwrap(),
            tempfile::tempdir().unwrap(),
            tempfile::tempdir().unwrap(),
        );
        let path = vec![early.path().into(), late.path().into()];
        let places = Places { beside: Some(beside.path().into()), path, python: None };
        let find = |name: &str| {
            places.command(ProgramKind::ByName, OsStr::new(name)).map_err(|usage| usage.0)
        };
        assert!(find("train").unwrap_err().ends_with("nor on PATH; give its path"));
        let in_late = file(late.path(), "train", 0o755);
        file(early.path(), "train", 0o644);
        assert_eq!(find("train").unwrap(), [in_late.clone().into_os_string()]);
        let in_beside = file(beside.path(), "train", 0o755);
        assert_eq!(find("train").unwrap(), [in_beside.into_os_string()]);
        assert_eq!(find(in_late.to_str().unwrap()).unwrap(), [in_late.into_os_string()]);
    }

    #[test]
    fn what_cannot_run_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let places = Places { beside: None, path: vec![folder.path().into()], python: None };
        let error =
            |path: PathBuf| places.command(ProgramKind::ByName, path.as_os_str()).unwrap_err().0;
        assert!(error(folder.path().join("absent")).contains("no such file"));
        assert!(error(folder.path().into()).contains("__main__.py"));
        let hint = error(file(folder.path(), "plain", 0o644));
        assert!(hint.contains("chmod") && hint.contains("--run-path"), "{hint}");
        assert!(error("absent.py".into()).ends_with("nor on PATH nor in the current folder"));
        assert!(error(file(folder.path(), "train.py", 0o644)).contains("python3"));
        let python = file(folder.path(), "python3", 0o755).into_os_string();
        let script = folder.path().join("train.py");
        let command = places.command(ProgramKind::ByName, script.as_os_str()).unwrap();
        assert_eq!(command, [python, "-u".into(), script.into_os_string()]);
    }

    #[test]
    fn who_runs_what() {
        let folder = tempfile::tempdir().unwrap();
        let python = file(folder.path(), "python3", 0o755).into_os_string();
        let other = file(folder.path(), "other", 0o755).into_os_string();
        let plain = file(folder.path(), "plain", 0o644).into_os_string();
        let script = file(folder.path(), "train.py", 0o755).into_os_string();
        let places = |python: Option<&str>| Places {
            beside: None,
            path: vec![folder.path().into()],
            python: python.map(OsString::from),
        };
        let command = |kind, name: &OsString| places(None).command(kind, name).unwrap();
        assert_eq!(command(ProgramKind::Executable, &script), std::slice::from_ref(&script));
        assert_eq!(
            command(ProgramKind::Script, &plain),
            [python.clone(), "-u".into(), plain.clone()]
        );
        assert_eq!(
            command(ProgramKind::Module, &"a.b".into()),
            [python.clone(), "-u".into(), "-m".into(), "a.b".into()]
        );
        for name in ["app.pyz", "app.pyc"] {
            let app = file(folder.path(), name, 0o755).into_os_string();
            assert_eq!(command(ProgramKind::ByName, &app), [python.clone(), "-u".into(), app]);
        }
        let package = folder.path().join("package");
        fs::create_dir(&package).unwrap();
        file(&package, "__main__.py", 0o644);
        let package = package.into_os_string();
        assert_eq!(
            command(ProgramKind::ByName, &package),
            [python.clone(), "-u".into(), package.clone()]
        );
        let refused = places(None).command(ProgramKind::Executable, &package).unwrap_err().0;
        assert!(refused.contains("leave --no-python out"), "{refused}");
        for name in [other.to_str().unwrap(), "other"] {
            let command = places(Some(name)).command(ProgramKind::ByName, &script).unwrap();
            assert_eq!(command, [other.clone(), "-u".into(), script.clone()]);
        }
        for name in ["absent", "/absent"] {
            assert!(
                places(Some(name))
                    .command(ProgramKind::Script, &plain)
                    .unwrap_err()
                    .0
                    .contains("PYTHON_EXEC")
            );
        }
    }
}
