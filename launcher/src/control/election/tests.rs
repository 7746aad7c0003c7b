//! What the simulation does not see.

use super::*;

/// Otherwise the agent would do nothing but ask what is due.
#[test]
fn who_is_no_member_any_more_does_not_stand() {
    let now = Instant::now();
    let lease = Duration::from_secs(8);
    let member = |id| Member { id, address: id.to_string() };
    let record = |version, members: &[MemberId]| JobRecord {
        job: 1,
        term: 1,
        version,
        members: members.iter().map(|id| member(*id)).collect(),
        progress: Progress::default(),
    };
    let mut election = Election::new(3, lease, lease, now);
    election.follow(record(1, &[1, 2, 3]), now);
    election.lost(false, now);
    election.may_stand(now);
    let due = election.deadline().unwrap();
    election.learn(record(2, &[1, 2, 4]), now);
    assert_eq!(election.elapsed(due), None);
    assert_eq!(election.deadline(), None);
}
