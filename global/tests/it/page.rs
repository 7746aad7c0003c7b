//! docs/global.md lists the operations that have a rule.

use std::collections::BTreeSet;
use std::path::Path;

use flow_global::rules;

const START: &str = "<!-- operations: begin -->\n";
const END: &str = "<!-- operations: end -->";

/// The list, in lines of at most 140 characters.
fn list() -> String {
    let names: BTreeSet<&str> = rules::names().collect();
    let mut lines = vec![String::new()];
    for name in names {
        let word = format!("`{name}` ");
        if lines.last().is_some_and(|line| line.len() + word.len() > 140) {
            lines.push(String::new());
        }
        lines.last_mut().unwrap().push_str(&word);
    }
    lines.iter().map(|line| format!("{}\n", line.trim_end())).collect()
}

/// With `FLOW_UPDATE_DOCS=1` this test writes the list into the page.
#[test]
fn the_page_lists_the_operations_with_rules() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/global.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = page.split_once(START).expect("the start of the list");
    let (listed, after) = rest.split_once(END).expect("the end of the list");
    if std::env::var_os("FLOW_UPDATE_DOCS").is_some() {
        std::fs::write(&path, format!("{before}{START}{}{END}{after}", list())).unwrap();
    } else {
        assert_eq!(
            listed,
            list(),
            "write the list: FLOW_UPDATE_DOCS=1 cargo test --release -p flow-global --test it page"
        );
    }
}
