//! Blocks are handed out, freed, kept and given back.

use super::*;

fn arena() -> Arc<Arena> {
    let (file, region) = Arena::create_file(1, 1).unwrap();
    Arc::new(Arena::map(&Arc::new(file), 1, region, 0).unwrap())
}

#[test]
fn freed_blocks_serve_again() {
    let arena = arena();
    let first = arena.allocate(100_000).unwrap();
    let offset = first.offset();
    drop(first);
    let second = arena.allocate(99_000).unwrap();
    assert_eq!(second.offset(), offset);
    assert_ne!(arena.allocate(100_000).unwrap().offset(), offset);
}

#[test]
fn blocks_do_not_overlap() {
    let arena = arena();
    let mut blocks: Vec<Block> = Vec::new();
    for round in 0..4 {
        for i in 0..200 {
            let block = arena.allocate(1 + (i * 7919 + round * 104_729) % 300_000).unwrap();
            for other in &blocks {
                assert!(
                    block.offset() + block.size() <= other.offset()
                        || other.offset() + other.size() <= block.offset()
                );
            }
            blocks.push(block);
        }
        let mut index = 0;
        blocks.retain(|_| {
            index += 1;
            index % 2 == 0
        });
    }
    drop(blocks);
    assert_eq!(arena.usage().0, 0);
}

#[test]
fn zeroed_blocks_are_zero_after_use() {
    let arena = arena();
    for bytes in [100, 5_000, 2 << 20] {
        let block = arena.allocate(bytes).unwrap();
        // SAFETY: the block is ours and at least `bytes` long.
        unsafe { std::ptr::write_bytes(block.as_ptr(), 0xAB, bytes) };
        drop(block);
        let block = arena.allocate_zeroed(bytes).unwrap();
        // SAFETY: as above.
        let content = unsafe { std::slice::from_raw_parts(block.as_ptr(), bytes) };
        assert!(content.iter().all(|&b| b == 0));
    }
}

#[test]
fn quarantined_blocks_are_not_used_again() {
    let arena = arena();
    let block = arena.allocate(100_000).unwrap();
    let offset = block.offset();
    arena.quarantine();
    drop(block);
    let other = arena.allocate(100_000).unwrap();
    assert_ne!(other.offset(), offset);
    arena.lift_quarantine();
    assert_eq!(arena.allocate(100_000).unwrap().offset(), offset);
    // Nor do those of before matter any more.
    let offset = other.offset();
    drop(other);
    assert_eq!(arena.allocate(100_000).unwrap().offset(), offset);
}

#[test]
fn a_full_region_says_so() {
    let arena = arena();
    assert!(arena.allocate(usize::MAX / 4).is_none());
    assert!(arena.allocate(arena.len + 1).is_none());
}

#[test]
fn a_large_free_block_serves_small_ones_when_the_region_is_full() {
    let arena = arena();
    let large = arena.allocate(arena.len / 16 * 13).unwrap();
    assert!(arena.allocate(arena.len / 4).is_none());
    drop(large);
    let blocks: Vec<Block> = (0..3).map(|_| arena.allocate(arena.len / 4).unwrap()).collect();
    let offsets: Vec<usize> = blocks.iter().map(Block::offset).collect();
    assert!(offsets.windows(2).all(|pair| pair[0] + blocks[0].size() <= pair[1]));
    assert!(arena.allocate(arena.len / 4).is_none());
    assert!(arena.allocate(100).is_some());
    // And the small ones a large one again, when they are free.
    drop(blocks);
    assert!(arena.allocate(arena.len / 4 * 3).is_some());
}

#[test]
fn pages_beyond_the_cache_are_given_back() {
    let arena = arena();
    let bytes = MIN_CACHE / 4;
    let blocks: Vec<Block> = (0..8).map(|_| arena.allocate(bytes).unwrap()).collect();
    drop(blocks);
    let (live, warm) = arena.usage();
    assert_eq!(live, 0);
    assert!(warm <= MIN_CACHE, "{warm} bytes kept");
}

#[test]
fn blocks_freed_long_ago_make_room_in_the_cache() {
    let arena = arena();
    let write = |block: &Block| {
        // SAFETY: the block is ours.
        unsafe { block.as_ptr().write(7) };
    };
    let small: Vec<Block> =
        (0..2 * MIN_CACHE / (512 << 10)).map(|_| arena.allocate(512 << 10).unwrap()).collect();
    small.iter().for_each(write);
    drop(small);
    assert!(arena.usage().1 <= MIN_CACHE);
    let large = arena.allocate(MIN_CACHE / 4).unwrap();
    write(&large);
    drop(large);
    assert!(arena.usage().1 <= MIN_CACHE);
    let large = arena.allocate(MIN_CACHE / 4).unwrap();
    // SAFETY: the block is ours. Had it given its pages back, they would read as zeros.
    assert_eq!(unsafe { large.as_ptr().read() }, 7);
}
