//! Files that tests write and execute.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// Writes an executable file. Another process writes it: Linux executes no file that is open for
/// writing ("Text file busy"), and a child that another thread of the test starts just then would
/// have inherited it open.
pub fn executable(path: impl AsRef<Path>, contents: impl AsRef<[u8]>) {
    let mut writer = Command::new("sh");
    writer.args(["-c", "cat > \"$0\" && chmod 755 \"$0\""]).arg(path.as_ref());
    let mut writer = writer.stdin(Stdio::piped()).spawn().unwrap();
    writer.stdin.take().unwrap().write_all(contents.as_ref()).unwrap();
    assert!(writer.wait().unwrap().success(), "cannot write {}", path.as_ref().display());
}
