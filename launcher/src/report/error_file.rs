//! Error files: what a worker of torch's `@record` writes to TORCHELASTIC_ERROR_FILE when it fails.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::SystemTime;

use rustix::fs::OFlags;
use serde_json::Value;

use crate::agent::exit_status::ExitStatus;

/// Larger files are ignored.
const LARGEST: u64 = 1 << 20;

/// The variable that names the file.
pub const VARIABLE: &str = "TORCHELASTIC_ERROR_FILE";

/// The error that a worker recorded.
#[derive(Clone, Debug, PartialEq)]
pub struct ErrorFile {
    pub message: String,
    pub traceback: Option<String>,
    /// The time at which the file was written: the timestamp inside is in whole seconds.
    pub time: Option<SystemTime>,
    whole: Value,
}

impl ErrorFile {
    /// Reads the file; None if there is none or it is malformed.
    pub fn read(path: &Path) -> Option<ErrorFile> {
        // A worker could have made it a pipe, which must not block us.
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(OFlags::NONBLOCK.bits() as i32)
            .open(path)
            .ok()?;
        let metadata = file.metadata().ok()?;
        let mut bytes = Vec::new();
        if !metadata.is_file()
            || file.take(LARGEST + 1).read_to_end(&mut bytes).ok()? as u64 > LARGEST
        {
            return None;
        }
        Some(ErrorFile { time: metadata.modified().ok(), ..ErrorFile::parse(&bytes)? })
    }

    fn parse(bytes: &[u8]) -> Option<ErrorFile> {
        let whole: Value = serde_json::from_slice(bytes).ok()?;
        // The message is a text, or an object with a text and other fields.
        let outer = &whole["message"];
        let (message, extra) = match outer.as_str() {
            Some(message) => (message, &whole),
            None => (outer["message"].as_str()?, &outer["extraInfo"]),
        };
        let message = message.to_string();
        let traceback = extra["py_callstack"].as_str().map(str::to_string);
        Some(ErrorFile { message, traceback, time: None, whole })
    }

    /// Makes the error that a worker would have recorded.
    #[cfg(test)]
    pub fn new(message: &str, traceback: Option<&str>) -> ErrorFile {
        let traceback = traceback.map(str::to_string);
        ErrorFile { message: message.into(), traceback, time: None, whole: Value::Null }
    }

    /// Copies the error, with the exit code, for a program that started flow-launch as a worker;
    /// torchrun does the same.
    pub fn copy(&self, path: &Path, end: ExitStatus) -> io::Result<()> {
        let mut whole = self.whole.clone();
        if let Some(message) = whole["message"].as_object_mut() {
            let code = match end {
                ExitStatus::Exit(code) => code,
                ExitStatus::Signal(signal) => -signal,
            };
            message.insert("errorCode".into(), code.into());
        }
        std::fs::write(path, whole.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    const RECORDED: &str = r#"{"message": {"message": "ValueError: boom", "extraInfo":
        {"py_callstack": "Traceback:\nboom\n", "timestamp": "1700000000"}}}"#;

    #[test]
    fn what_record_writes_is_read() {
        let error = ErrorFile::parse(RECORDED.as_bytes()).unwrap();
        assert_eq!(error.message, "ValueError: boom");
        assert_eq!(error.traceback.as_deref(), Some("Traceback:\nboom\n"));
        let plain = ErrorFile::parse(br#"{"message": "boom", "timestamp": 12.5}"#).unwrap();
        assert_eq!((plain.message.as_str(), plain.traceback), ("boom", None));
        let bare = ErrorFile::parse(br#"{"message": {"message": "boom"}}"#).unwrap();
        assert_eq!(bare.message, "boom");
    }

    #[test]
    fn garbage_is_no_error_file() {
        for text in [
            "",
            "{",
            "[]",
            "1",
            "{\"message\": 7}",
            "{\"message\": {\"message\": []}}",
            "\u{0}\u{1}",
        ] {
            assert_eq!(ErrorFile::parse(text.as_bytes()), None, "{text}");
        }
        assert_eq!(ErrorFile::parse("[".repeat(100_000).as_bytes()), None);
    }

    #[test]
    fn only_small_regular_files_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("error.json");
        assert_eq!(ErrorFile::read(&path), None);
        std::fs::write(&path, RECORDED).unwrap();
        assert!(ErrorFile::read(&path).is_some());
        std::fs::write(&path, format!("{RECORDED}{}", " ".repeat(1 << 20))).unwrap();
        assert_eq!(ErrorFile::read(&path), None);
        std::fs::remove_file(&path).unwrap();
        mknodat(CWD, &path, FileType::Fifo, Mode::RWXU, 0).unwrap();
        assert_eq!(ErrorFile::read(&path), None);
    }

    #[test]
    fn a_copy_has_the_exit_code() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("reply.json");
        let code = |text: &str, end| {
            ErrorFile::parse(text.as_bytes()).unwrap().copy(&path, end).unwrap();
            let copy: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
            copy["message"]["errorCode"].as_i64()
        };
        assert_eq!(code(RECORDED, ExitStatus::Exit(3)), Some(3));
        assert_eq!(code(RECORDED, ExitStatus::Signal(11)), Some(-11));
        assert_eq!(code(r#"{"message": "boom"}"#, ExitStatus::Exit(3)), None);
        assert_eq!(ErrorFile::read(&path).unwrap().message, "boom");
    }
}
