//! The files of the ranks of a job, before they are merged.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};

use super::arrivals::Arrivals;
use super::format::{Origin, RawTimeline, TimelineEvent};

/// The variable that names the folder to workers.
pub const VARIABLE: &str = "FLOW_TRACE";

/// Bytes of a piece. The leader's inbox has room for one piece of each of a thousand nodes.
const PIECE_BYTES: u64 = 48 << 10;

/// A part of a rank's file, on its way to the leader.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Piece {
    pub rank: u32,
    /// It is the first piece.
    pub begins: bool,
    pub text: String,
}

/// The folder for the files of this node's ranks; the leader's also takes those of other nodes.
pub struct TraceFolder {
    path: PathBuf,
}

impl TraceFolder {
    /// Makes the folder below one that is removed when flow-launch ends.
    pub fn create(temporary: &Path) -> io::Result<TraceFolder> {
        let path = temporary.join("trace");
        DirBuilder::new().mode(0o700).create(&path)?;
        Ok(TraceFolder { path })
    }

    /// Returns the path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the files of an earlier round.
    pub fn clear(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.path)? {
            fs::remove_file(entry?.path())?;
        }
        Ok(())
    }

    /// Returns the file of a rank.
    pub fn file(&self, rank: u32) -> PathBuf {
        self.path.join(format!("rank{rank}.json"))
    }

    /// Appends a piece of a file of another node.
    pub fn append(&self, piece: &Piece) -> io::Result<()> {
        let mut options = OpenOptions::new();
        let options = options.append(!piece.begins).write(true).create(true).truncate(piece.begins);
        options.open(self.file(piece.rank))?.write_all(piece.text.as_bytes())
    }

    /// Merges the files of all ranks into one at `to`, where events of collectives say which rank
    /// was the last to arrive. Returns the ranks that have no valid file.
    pub fn merge(&self, world_size: u32, to: &Path) -> anyhow::Result<Vec<u32>> {
        let mut name = to.as_os_str().to_owned();
        name.push(".partial");
        let partial = PathBuf::from(name);
        let merged = self.write_merged(world_size, &partial);
        let merged = merged.and_then(|missing| {
            fs::rename(&partial, to)?;
            Ok(missing)
        });
        if merged.is_err() {
            let _ = fs::remove_file(&partial); // the first error counts
        }
        merged.with_context(|| format!("cannot write {}", to.display()))
    }

    /// Writes the merged file; returns the ranks that have no valid file.
    fn write_merged(&self, world_size: u32, to: &Path) -> io::Result<Vec<u32>> {
        let mut out = BufWriter::new(File::create(to)?);
        let mut arrivals = Arrivals::default();
        let timelines = (0..world_size).filter_map(|rank| read(&self.file(rank)));
        for event in timelines.flat_map(|timeline| timeline.events) {
            parse(&event).iter().for_each(|event| arrivals.add(event));
        }
        let mut missing = Vec::new();
        let mut origins = Vec::new();
        let mut separator: &[u8] = b"\n";
        out.write_all(b"{\"traceEvents\":[")?;
        for rank in 0..world_size {
            let Some(timeline) = read(&self.file(rank)) else {
                missing.push(rank);
                continue;
            };
            for event in &timeline.events {
                out.write_all(separator)?;
                match parse(event).and_then(|event| arrivals.last(&event)) {
                    Some(last) => serde_json::to_writer(&mut out, &with_last(event, last)?)?,
                    None => out.write_all(event.get().as_bytes())?,
                }
                separator = b",\n";
            }
            origins.push(timeline.origin);
        }
        out.write_all(b"\n],\"otherData\":")?;
        serde_json::to_writer(&mut out, &Origin { world_size, ranks: &origins })?;
        out.write_all(b"}\n")?;
        out.into_inner()?.sync_all()?;
        Ok(missing)
    }
}

/// Reads a file; None if there is none, or a malformed one.
fn read(path: &Path) -> Option<RawTimeline> {
    let text = fs::read_to_string(path).ok()?;
    serde_json::from_str(&text)
        .inspect_err(|error| log::warn!("{} is malformed: {error}", path.display()))
        .ok()
}

fn parse(event: &RawValue) -> Option<TimelineEvent> {
    serde_json::from_str(event.get()).ok()
}

/// Returns an event with the last rank to arrive among its arguments; all else stays as it was.
fn with_last(event: &RawValue, last: u32) -> serde_json::Result<BTreeMap<String, Box<RawValue>>> {
    let mut event: BTreeMap<String, Box<RawValue>> = serde_json::from_str(event.get())?;
    if let Some(arguments) = event.get_mut("args") {
        let mut changed: BTreeMap<String, Box<RawValue>> = serde_json::from_str(arguments.get())?;
        changed.insert("last_to_arrive".into(), to_raw_value(&last)?);
        *arguments = to_raw_value(&changed)?;
    }
    Ok(event)
}

/// Calls `send` with the pieces of a rank's file, until it returns an error.
pub fn send_pieces<E>(
    rank: u32,
    path: &Path,
    mut send: impl FnMut(Piece) -> Result<(), E>,
) -> Result<(), E> {
    let Ok(mut file) = File::open(path) else { return Ok(()) };
    let mut bytes = Vec::new();
    let mut begins = true;
    loop {
        let Ok(count) = (&mut file).take(PIECE_BYTES).read_to_end(&mut bytes) else {
            return Ok(());
        };
        // A character of several bytes may be divided: the rest of it goes with the next piece.
        let whole = match std::str::from_utf8(&bytes) {
            Err(error) if count > 0 && error.error_len().is_none() => error.valid_up_to(),
            _ => bytes.len(),
        };
        let text = String::from_utf8_lossy(&bytes[..whole]).into_owned();
        if count > 0 || !text.is_empty() {
            send(Piece { rank, begins, text })?;
        }
        bytes.drain(..whole);
        begins = false;
        if count == 0 {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn folder() -> (tempfile::TempDir, TraceFolder) {
        let temporary = tempfile::tempdir().unwrap();
        let folder = TraceFolder::create(temporary.path()).unwrap();
        (temporary, folder)
    }

    fn timeline(rank: u32, name: &str) -> String {
        let event = json!({"ph": "X", "cat": "comm", "name": name, "pid": rank, "ts": 1, "dur": 2});
        json!({"traceEvents": [event], "otherData": {"rank": rank, "host": "é"}}).to_string()
    }

    #[test]
    fn ranks_are_merged_and_missing_ones_named() {
        let (temporary, folder) = folder();
        fs::write(folder.file(0), timeline(0, "first")).unwrap();
        fs::write(folder.file(2), timeline(2, "third")).unwrap();
        fs::write(folder.file(3), "{\"traceEvents\": [").unwrap();
        let merged = temporary.path().join("all.json");
        assert_eq!(folder.merge(4, &merged).unwrap(), [1, 3]);
        let merged: Value = serde_json::from_slice(&fs::read(merged).unwrap()).unwrap();
        let events = merged["traceEvents"].as_array().unwrap();
        let names: Vec<_> = events.iter().map(|event| event["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["first", "third"]);
        assert_eq!(merged["otherData"]["world_size"], 4);
        assert_eq!(merged["otherData"]["ranks"][1]["rank"], 2);
        assert!(!temporary.path().join("all.json.partial").exists());
        let error = folder.merge(1, Path::new("/no/such/folder/x")).unwrap_err();
        assert!(format!("{error:#}").starts_with("cannot write /no/such/folder/x: "), "{error:#}");
    }

    #[test]
    fn collectives_say_who_was_the_last_to_arrive() {
        let (temporary, folder) = folder();
        let event = |rank: u32, name: &str, sequence: u32, started: f64| {
            let args = json!({"group": "0", "sequence": sequence, "started": started, "bytes": 4});
            json!({"ph": "X", "name": name, "pid": rank, "ts": 9.25, "dur": 1, "args": args})
        };
        let ranks = [
            [event(0, "all_reduce", 0, 1.5), event(0, "send", 1, 1.0), event(0, "barrier", 2, 7.0)],
            [
                event(1, "all_reduce", 0, 1.25),
                event(1, "send", 1, 2.0),
                event(1, "barrier", 3, 8.0),
            ],
        ];
        for (rank, events) in (0..).zip(&ranks) {
            let text = json!({"traceEvents": events, "otherData": {}}).to_string();
            fs::write(folder.file(rank), text).unwrap();
        }
        let merged = temporary.path().join("all.json");
        folder.merge(2, &merged).unwrap();
        let merged: Value = serde_json::from_slice(&fs::read(merged).unwrap()).unwrap();
        let mut expected = ranks.concat();
        expected[0]["args"]["last_to_arrive"] = json!(0);
        expected[3]["args"]["last_to_arrive"] = json!(0);
        assert_eq!(merged["traceEvents"], json!(expected));
    }

    #[test]
    fn a_file_arrives_in_pieces_as_it_was() {
        let (_temporary, folder) = folder();
        let text = timeline(7, &"é€😀".repeat(20_000));
        let source = folder.path().join("source");
        fs::write(&source, &text).unwrap();
        fs::write(folder.file(7), "of an earlier round").unwrap();
        let mut count = 0;
        let sent = send_pieces(7, &source, |piece| {
            count += 1;
            assert!(piece.text.len() as u64 <= PIECE_BYTES + 3);
            folder.append(&piece)
        });
        sent.unwrap();
        assert!(count > 3, "{count}");
        assert_eq!(fs::read_to_string(folder.file(7)).unwrap(), text);
        folder.clear().unwrap();
        assert!(!folder.file(7).exists());
    }
}
