//! What a probe has found, and how all of it is printed.

use serde::{Deserialize, Serialize};

/// How it is with a fact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    Ok,
    /// Jobs run, but slower than they could, or not all that a user may want works.
    Advice,
    /// Something is there and does not work, or jobs fail.
    Broken,
}

/// A fact about a machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fact {
    pub subject: String,
    pub state: State,
    pub value: String,
    /// What to do, if it is not ok.
    pub advice: Option<String>,
}

impl Fact {
    /// A fact with which nothing is wrong.
    pub fn ok(subject: &str, value: impl Into<String>) -> Fact {
        Fact { subject: subject.into(), state: State::Ok, value: value.into(), advice: None }
    }

    /// The same fact, with something to do.
    pub fn advise(self, advice: impl Into<String>) -> Fact {
        Fact { state: State::Advice, advice: Some(advice.into()), ..self }
    }

    /// The same fact, which is broken, with what would repair it.
    pub fn broken(self, advice: impl Into<String>) -> Fact {
        Fact { state: State::Broken, advice: Some(advice.into()), ..self }
    }
}

/// All facts about a machine; `--json` prints it.
#[derive(Debug, Serialize, Deserialize)]
pub struct Examination {
    /// flow-launch's.
    pub version: String,
    pub host: String,
    pub facts: Vec<Fact>,
}

impl Examination {
    /// Returns the number of facts of this state.
    pub fn count(&self, state: State) -> usize {
        self.facts.iter().filter(|fact| fact.state == state).count()
    }

    /// Returns a line for each fact, and one more for its advice.
    pub fn text(&self) -> String {
        let width = self.facts.iter().map(|fact| fact.subject.chars().count()).max().unwrap_or(0);
        let mut text = format!("flow-launch {} on {}\n", self.version, self.host);
        for Fact { subject, state, value, advice } in &self.facts {
            let state = match state {
                State::Ok => "ok",
                State::Advice => "advice",
                State::Broken => "BROKEN",
            };
            text += &format!("{state:6}  {subject:width$}  {value}\n");
            if let Some(advice) = advice {
                text += &format!("{:6}  {:width$}  -> {advice}\n", "", "");
            }
        }
        text + &match (self.count(State::Broken), self.count(State::Advice)) {
            (0, 0) => "all is well\n".into(),
            (0, advice) => format!("nothing is broken; advice on {advice}\n"),
            (broken, advice) => format!("{broken} broken; advice on {advice}\n"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn examination(facts: Vec<Fact>) -> Examination {
        Examination { version: "1.2.3".into(), host: "node0".into(), facts }
    }

    #[test]
    fn facts_are_aligned_lines() {
        let facts = vec![
            Fact::ok("cores", "2"),
            Fact::ok("/dev/shm", "64 MiB").advise("more"),
            Fact::ok("PyTorch", "none of it loads").broken("install it"),
        ];
        let expected = "flow-launch 1.2.3 on node0\n\
                        ok      cores     2\n\
                        advice  /dev/shm  64 MiB\n                  -> more\n\
                        BROKEN  PyTorch   none of it loads\n                  -> install it\n\
                        1 broken; advice on 1\n";
        assert_eq!(examination(facts).text(), expected);
        assert!(examination(Vec::new()).text().ends_with("all is well\n"));
    }

    #[test]
    fn json_is_read_as_it_is_written() {
        let fact = Fact::ok("cores", "2").advise("more");
        let json = serde_json::to_string(&examination(vec![fact.clone()])).unwrap();
        let read: Examination = serde_json::from_str(&json).unwrap();
        assert_eq!(read.facts, [fact]);
        assert!(json.contains(r#""state":"advice""#), "{json}");
    }
}
