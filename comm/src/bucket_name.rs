//! The names of buckets.

/// The number of a bucket without gradients: what ranks in a join tell each other.
pub const JOIN_NOTICE: u32 = u32::MAX - 1;

/// Names a bucket, for errors and reports.
pub fn bucket_name(bucket: u32) -> String {
    match bucket {
        JOIN_NOTICE => "a notice in a join".to_owned(),
        number => format!("bucket {number}"),
    }
}
