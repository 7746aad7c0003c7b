//! PyTorch, as it reads what Flow has written.

use std::path::Path;
use std::process::Command;

/// Runs a program, which may `import merged`, with `file` as its argument. Returns what it prints;
/// None, and a printed reason, where there is no PyTorch.
pub fn pytorch(program: &str, file: &Path) -> Option<String> {
    let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".into());
    let here = env!("CARGO_MANIFEST_DIR");
    let mut command = Command::new(python);
    command.args(["-B", "-c", program]).arg(file);
    command.env("PYTHONPATH", format!("{here}/tests/pytorch:{here}/../.python-libraries"));
    let reason = match command.output() {
        Err(error) => error.to_string(),
        Ok(run) => {
            let text = String::from_utf8_lossy(&run.stdout).into_owned();
            print!("{}", String::from_utf8_lossy(&run.stderr));
            match run.status.code() {
                Some(0) => return Some(text),
                Some(77) => text.trim().to_owned(),
                _ => panic!("{program}: {}", run.status),
            }
        }
    };
    println!("SKIPPED: a merged checkpoint read by PyTorch: {reason}; set PYTHON");
    None
}
