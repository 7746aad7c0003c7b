//! The flags about output.

use std::path::{self, PathBuf};

use super::flag::Valued;
use super::flag_table as table;
use super::settings::{Setting, Settings};
use super::usage::Usage;
use crate::job::{OutputOptions, StreamMap, Streams};

/// Reads the flags about output.
pub fn output(settings: &Settings) -> Result<OutputOptions, Usage> {
    let redirects_all = settings.is_on(table::REDIRECT_STDOUT_AND_STDERR)?;
    let oneflow_names = redirects_all || settings.get(table::LOGDIR).is_some();
    let mut log_dir = settings.get_path(table::LOG_DIR)?;
    if oneflow_names {
        if let Some(setting) = settings.get(table::LOG_DIR) {
            let source = setting.source();
            return Err(Usage(format!(
                "{source} is torchrun's and --logdir OneFlow's; use the flags of one of them"
            )));
        }
        log_dir = Some(oneflow_folder(settings)?);
    }
    Ok(OutputOptions {
        prefix: settings.is_on(table::PREFIX)?,
        log_dir,
        oneflow_names,
        redirects: if redirects_all {
            StreamMap::All(BOTH)
        } else {
            streams(settings, table::REDIRECTS)?
        },
        tee: streams(settings, table::TEE)?,
        prefix_template: settings
            .get(table::LOG_LINE_PREFIX_TEMPLATE)
            .or_else(|| settings.variable("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"))
            .map(|setting| setting.literal().map(String::from))
            .transpose()?
            .filter(|template| !template.is_empty()),
        shown: settings
            .get(table::LOCAL_RANKS_FILTER)
            .map(|setting| local_ranks(&setting))
            .transpose()?,
        stdout_filters: list(settings, table::DUPLICATE_STDOUT_FILTERS)?,
        stderr_filters: list(settings, table::DUPLICATE_STDERR_FILTERS)?,
    })
}

const BOTH: Streams = Streams { stdout: true, stderr: true };

/// Returns an absolute path: workers get it and may be in another folder.
fn oneflow_folder(settings: &Settings) -> Result<PathBuf, Usage> {
    let folder = settings.get_path(table::LOGDIR)?.unwrap_or_else(|| "log".into());
    path::absolute(&folder)
        .map_err(|error| Usage(format!("--logdir is '{}': {error}", folder.display())))
}

/// Reads `3`, or `0:1,10:3`.
fn streams(settings: &Settings, flag: Valued) -> Result<StreamMap, Usage> {
    let Some(setting) = settings.get(flag) else {
        return Ok(StreamMap::All(Streams::default()));
    };
    let text = setting.text()?;
    if let Some(streams) = bits(text) {
        return Ok(StreamMap::All(streams));
    }
    let each: Option<_> = text.split(',').map(streams_of_rank).collect();
    each.map(StreamMap::Each).ok_or_else(|| {
        setting.wrong(
            "0 (none), 1 (stdout), 2 (stderr) or 3 (both), or such numbers by local rank: 0:3,10:1",
        )
    })
}

/// Reads `10:3`.
fn streams_of_rank(text: &str) -> Option<(u32, Streams)> {
    let (rank, streams) = text.split_once(':')?;
    Some((rank.parse().ok()?, bits(streams)?))
}

fn bits(text: &str) -> Option<Streams> {
    let number: u8 = text.parse().ok().filter(|number| *number <= 3)?;
    Some(Streams { stdout: number & 1 != 0, stderr: number & 2 != 0 })
}

fn local_ranks(setting: &Setting) -> Result<Vec<u32>, Usage> {
    let ranks = setting.text()?.split(',').map(|rank| rank.trim().parse());
    ranks.collect::<Result<_, _>>().map_err(|_| setting.wrong("local ranks: 0,2"))
}

/// Splits at commas; two commas are a literal comma.
fn list(settings: &Settings, flag: Valued) -> Result<Vec<String>, Usage> {
    let Some(setting) = settings.get(flag) else { return Ok(Vec::new()) };
    let mut items = vec![String::new()];
    let mut characters = setting.literal()?.chars().peekable();
    while let Some(c) = characters.next() {
        match items.last_mut() {
            Some(last) if c != ',' || characters.next_if_eq(&',').is_some() => last.push(c),
            _ => items.push(String::new()),
        }
    }
    items.retain(|item| !item.is_empty());
    Ok(items)
}

/// Refuses values that name torchrun's plug-ins.
pub fn refuse_plugins(settings: &Settings) -> Result<(), Usage> {
    if let Some(setting) =
        settings.get(table::LOGS_SPECS).filter(|setting| setting.text().ok() != Some("default"))
    {
        return Err(setting
            .wrong("left out: flow-launch has no plug-ins; see --log-dir, --redirects and --tee"));
    }
    if let Some(setting) = settings.get(table::EVENT_LOG_HANDLER) {
        let known = ["null", "console", "dynamic_rendezvous"].map(|name| (name, name));
        if setting.one_of(&known)? != "null" {
            settings.warn(format!(
                "{} has no meaning here; --events FILE writes what happens",
                setting.source()
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::tests::{parse, refusal};
    use crate::job::{OutputOptions, StreamMap, Streams};

    fn output(line: &str) -> OutputOptions {
        parse(&format!("{line} train")).unwrap().output
    }

    #[test]
    fn maps_of_streams() {
        let streams = |number: u8| Streams { stdout: number & 1 != 0, stderr: number & 2 != 0 };
        assert_eq!(output("").redirects, StreamMap::All(streams(0)));
        assert_eq!(output("-r 3 -t 1").redirects, StreamMap::All(streams(3)));
        assert_eq!(output("-r3 -t1").tee, StreamMap::All(streams(1)));
        assert_eq!(output("--redirect=3 --tee=3").redirects, StreamMap::All(streams(3)));
        let map = output("--tee 0:1,10:3,127:2").tee;
        assert_eq!([0, 10, 127, 1].map(|rank| map.of(rank)), [1, 3, 2, 0].map(streams));
        for wrong in ["4", "-1", "0:4", "0:", ":1", "a:1", "0:1,", "0:1,2", "all"] {
            assert!(
                refusal(&format!("--redirects={wrong} train")).contains("--redirects"),
                "{wrong}"
            );
        }
    }

    #[test]
    fn ranks_that_are_shown() {
        assert_eq!(output("").shown, None);
        assert_eq!(output("--local-ranks-filter 0,12").shown, Some(vec![0, 12]));
        assert!(refusal("--local-ranks-filter 0,x train").contains("--local-ranks-filter"));
    }

    #[test]
    fn two_commas_are_a_comma() {
        assert_eq!(
            output("--duplicate-stdout-filters apple,orange").stdout_filters,
            ["apple", "orange"]
        );
        assert_eq!(output("--duplicate_stderr_filters a,,b,c").stderr_filters, ["a,b", "c"]);
        assert_eq!(output("--duplicate_stderr_filters=,,").stderr_filters, [","]);
        assert!(output("--duplicate_stderr_filters=").stderr_filters.is_empty());
    }

    #[test]
    fn oneflows_files() {
        let all = output("--redirect_stdout_and_stderr");
        assert_eq!(all.redirects, StreamMap::All(super::BOTH));
        assert_eq!(all.log_dir, Some(std::env::current_dir().unwrap().join("log")));
        assert!(all.oneflow_names);
        assert_eq!(output("--logdir /x").log_dir, Some("/x".into()));
        let torchruns = output("--log-dir x");
        assert!(torchruns.log_dir == Some("x".into()) && !torchruns.oneflow_names);
        assert!(refusal("--log-dir x --logdir y train").contains("one of them"));
    }

    #[test]
    fn plug_ins_are_refused() {
        assert!(refusal("--logs-specs mine train").contains("no plug-ins"));
        assert!(refusal("--event-log-handler mine train").contains("console"));
        assert!(parse("--logs-specs default --event-log-handler console train").is_ok());
    }
}
