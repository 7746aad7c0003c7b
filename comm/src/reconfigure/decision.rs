//! Who are the members of the next epoch: pure decisions.

use crate::bootstrap::lineage::{Members, Process};

/// Returns the next members: those of before that are present, and the newcomers, in the order of
/// their seats. A newcomer has the seat of a process that has ended, or a new one. Of several for one
/// seat the last one counts, as a launcher starts it when the one before has ended. None is one that
/// has given up.
pub fn next_members(
    before: &Members,
    present: Vec<Process>,
    newcomers: &[Option<Process>],
) -> Members {
    let mut processes = present;
    let mut refused = Vec::new();
    for (index, newcomer) in newcomers.iter().enumerate() {
        let Some(newcomer) = newcomer else { continue };
        let number = before.newcomers + index;
        let mut later = newcomers[index + 1..].iter().flatten();
        let is_last = later.all(|later| later.seat.number != newcomer.seat.number);
        // Its launcher knows that the one before has ended.
        processes.retain(|member| {
            member.seat.number != newcomer.seat.number
                || member.seat.replacement >= newcomer.seat.replacement
        });
        if let Some(member) =
            processes.iter().find(|member| member.seat.number == newcomer.seat.number)
        {
            refused.push((number, format!("{} is a member", member.describe())));
        } else if is_last {
            processes.push(newcomer.clone());
        } else {
            refused.push((number, "another process has joined in its place".into()));
        }
    }
    processes.sort_by_key(|process| process.seat.number);
    let newcomers = before.newcomers + newcomers.len();
    Members { epoch: before.epoch + 1, processes, newcomers, refused }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::lineage::Seat;

    fn process(seat: usize, pid: u32) -> Process {
        Process {
            seat: Seat::first(seat),
            pid,
            host_id: "host".into(),
            node: "#0".into(),
            host: "host".into(),
            memory: None,
        }
    }

    fn before() -> Members {
        let processes = (0..3).map(|seat| process(seat, 100 + seat as u32)).collect();
        Members { epoch: 4, processes, newcomers: 5, refused: Vec::new() }
    }

    fn pids(members: &Members) -> Vec<u32> {
        members.processes.iter().map(|process| process.pid).collect()
    }

    #[test]
    fn those_that_are_left_move_up() {
        let next = next_members(&before(), vec![process(2, 102), process(0, 100)], &[]);
        assert_eq!((next.epoch, pids(&next)), (5, vec![100, 102]));
    }

    #[test]
    fn a_newcomer_has_the_place_of_the_one_that_has_ended() {
        let present = vec![process(0, 100), process(2, 102)];
        let next =
            next_members(&before(), present, &[Some(process(1, 7)), None, Some(process(3, 8))]);
        assert_eq!((pids(&next), next.newcomers), (vec![100, 7, 102, 8], 8));
    }

    #[test]
    fn a_process_that_was_started_for_a_member_has_its_place() {
        let present = vec![process(0, 100), process(1, 101), process(2, 102)];
        let mut newcomer = process(1, 7);
        newcomer.seat.replacement = 1;
        let next = next_members(&before(), present, &[Some(newcomer)]);
        assert_eq!((pids(&next), next.refused.len()), (vec![100, 7, 102], 0));
    }

    #[test]
    fn no_two_members_have_one_seat() {
        let present = vec![process(0, 100), process(2, 102)];
        let newcomers = [process(2, 7), process(1, 8), process(1, 9)].map(Some);
        let next = next_members(&before(), present, &newcomers);
        assert_eq!(pids(&next), [100, 9, 102]);
        let refused = [
            (5, "process 2 (pid 102 on host) is a member".to_owned()),
            (6, "another process has joined in its place".to_owned()),
        ];
        assert_eq!(next.refused, refused);
    }
}
