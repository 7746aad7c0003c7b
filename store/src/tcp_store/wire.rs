//! The requests of PyTorch's clients, taken from a stream of bytes that ends anywhere.
//!
//! A request is an operation (u8) and its fields. Numbers are little-endian; a key or a value is
//! its length (u64) and its bytes. The limits are those of PyTorch's own server.

use std::io::{self, ErrorKind};
use std::mem;
use std::sync::Arc;

/// The first request of every client: VALIDATE, and a number that tells PyTorch's clients from
/// others.
pub const VALIDATION: [u8; 5] = [0, 0xce, 0xf7, 0x85, 0x3c];

const MAX_KEY: u64 = 8 << 10;
const MAX_VALUE: u64 = 8 << 20;
/// The most keys in one request.
const MAX_COUNT: u64 = 128 << 10;

/// A request of one of PyTorch's clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TcpRequest {
    Set { key: Vec<u8>, value: TcpValue },
    CompareSet { key: Vec<u8>, expected: TcpValue, desired: TcpValue },
    Get { key: Vec<u8> },
    MultiGet { keys: Vec<Vec<u8>> },
    Add { key: Vec<u8>, amount: i64 },
    Check { keys: Vec<Vec<u8>> },
    Wait { keys: Vec<Vec<u8>> },
    NumKeys,
    Delete { key: Vec<u8> },
    Append { key: Vec<u8>, value: TcpValue },
    CancelWait,
    Ping { nonce: [u8; 4] },
    QueuePush { key: Vec<u8>, value: TcpValue },
    QueuePop { key: Vec<u8> },
    QueueLen { key: Vec<u8> },
    ListKeys,
    Barrier { key: Vec<u8>, world_size: i64 },
}

/// A value as it is sent, with its length in front: all who ask for it share one copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TcpValue(pub Arc<Vec<u8>>);

impl TcpValue {
    /// Makes a value of bytes.
    pub fn new(bytes: &[u8]) -> TcpValue {
        let mut wire = Vec::with_capacity(8 + bytes.len());
        put(&mut wire, bytes);
        TcpValue(Arc::new(wire))
    }

    /// Returns the value's bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.0[8..]
    }

    /// Adds the bytes of another value.
    pub fn append(&mut self, other: &TcpValue) {
        let wire = Arc::make_mut(&mut self.0);
        wire.extend_from_slice(other.bytes());
        let length = wire.len() as u64 - 8;
        wire[..8].copy_from_slice(&length.to_le_bytes());
    }
}

/// Writes bytes with their length in front.
pub fn put(wire: &mut Vec<u8>, bytes: &[u8]) {
    wire.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
    wire.extend_from_slice(bytes);
}

/// Requests of one client; the last may be incomplete.
///
/// A MULTI_SET comes out as so many sets: nothing of it has to be kept until all has come.
#[derive(Default)]
pub struct Decoder {
    partial: Option<Partial>,
}

struct Partial {
    operation: u8,
    /// The number of keys that it has, or of requests that are still to come, for operations that
    /// say so.
    count: Option<u64>,
    taken: Vec<Vec<u8>>,
    /// The bytes that these take.
    size: usize,
}

/// The parts of a request.
enum RequestFormat {
    Once(&'static [Field]),
    /// A number, and so many keys.
    Keys,
    /// A number, and so many requests.
    Each(&'static [Field]),
}

#[derive(Clone, Copy)]
enum Field {
    Key,
    Value,
    Number,
    Nonce,
}

impl RequestFormat {
    fn of(operation: u8) -> Option<RequestFormat> {
        use Field::*;
        Some(match operation {
            7 | 12 | 17 => RequestFormat::Once(&[]),
            3 | 8 | 15 | 16 => RequestFormat::Once(&[Key]),
            1 | 9 | 14 => RequestFormat::Once(&[Key, Value]),
            2 => RequestFormat::Once(&[Key, Value, Value]),
            4 | 18 => RequestFormat::Once(&[Key, Number]),
            13 => RequestFormat::Once(&[Nonce]),
            5 | 6 | 10 => RequestFormat::Keys,
            11 => RequestFormat::Each(&[Key, Value]),
            _ => return None,
        })
    }
}

impl Decoder {
    /// Takes a request off the beginning of `input`, or as much of one as is there. Returns how
    /// many bytes it has taken.
    ///
    /// # Errors
    /// `InvalidData` if it is none.
    pub fn decode(&mut self, input: &[u8]) -> io::Result<(usize, Option<TcpRequest>)> {
        let mut rest = input;
        let request = self.take(&mut rest)?;
        Ok((input.len() - rest.len(), request))
    }

    /// Returns the bytes that it keeps of an incomplete request.
    pub fn size(&self) -> usize {
        self.partial.as_ref().map_or(0, |partial| partial.size)
    }

    fn take(&mut self, rest: &mut &[u8]) -> io::Result<Option<TcpRequest>> {
        if self.partial.is_none() {
            let Some([operation]) = array(rest) else { return Ok(None) };
            self.partial = Some(Partial { operation, count: None, taken: Vec::new(), size: 0 });
        }
        let Some(partial) = &mut self.partial else { return Ok(None) };
        let format = RequestFormat::of(partial.operation).ok_or_else(invalid)?;
        if partial.count.is_none() && !matches!(format, RequestFormat::Once(_)) {
            let Some(count) = array(rest).map(u64::from_le_bytes) else { return Ok(None) };
            partial.count = Some(count).filter(|count| *count <= MAX_COUNT);
            partial.count.ok_or_else(invalid)?;
        }
        let (fields, repeats) = match format {
            RequestFormat::Once(fields) => (fields, 1),
            RequestFormat::Keys => (&[Field::Key][..], partial.count.unwrap_or_default() as usize),
            RequestFormat::Each(_) if partial.count == Some(0) => {
                self.partial = None;
                return Ok(None);
            }
            RequestFormat::Each(fields) => (fields, 1),
        };
        while partial.taken.len() < fields.len() * repeats {
            let Some(field) = fields[partial.taken.len() % fields.len()].take(rest)? else {
                return Ok(None);
            };
            partial.size += field.len() + mem::size_of::<Vec<u8>>();
            partial.taken.push(field);
        }
        let request = request(partial.operation, mem::take(&mut partial.taken));
        partial.size = 0;
        partial.count = partial
            .count
            .filter(|_| matches!(format, RequestFormat::Each(_)))
            .map(|count| count - 1);
        if partial.count.is_none_or(|count| count == 0) {
            self.partial = None;
        }
        Ok(request)
    }
}

impl Field {
    /// Takes one off the beginning of `rest`: a value with its length, all others without.
    fn take(self, rest: &mut &[u8]) -> io::Result<Option<Vec<u8>>> {
        let (head, length) = match self {
            Field::Number => (0, 8),
            Field::Nonce => (0, 4),
            Field::Key | Field::Value => {
                let Some(length) = array(&mut &rest[..]).map(u64::from_le_bytes) else {
                    return Ok(None);
                };
                if length > if matches!(self, Field::Key) { MAX_KEY } else { MAX_VALUE } {
                    return Err(invalid());
                }
                (8, length as usize)
            }
        };
        let Some((field, after)) = rest.split_at_checked(head + length) else { return Ok(None) };
        *rest = after;
        Ok(Some(if matches!(self, Field::Value) { field } else { &field[head..] }.to_vec()))
    }
}

/// Returns the request with these fields, which are those of its layout.
fn request(operation: u8, fields: Vec<Vec<u8>>) -> Option<TcpRequest> {
    match operation {
        5 => return Some(TcpRequest::Check { keys: fields }),
        6 => return Some(TcpRequest::Wait { keys: fields }),
        10 => return Some(TcpRequest::MultiGet { keys: fields }),
        _ => {}
    }
    let mut fields = fields.into_iter();
    let mut next = || fields.next().unwrap_or_default();
    Some(match operation {
        1 | 11 => TcpRequest::Set { key: next(), value: TcpValue(Arc::new(next())) },
        2 => TcpRequest::CompareSet {
            key: next(),
            expected: TcpValue(Arc::new(next())),
            desired: TcpValue(Arc::new(next())),
        },
        3 => TcpRequest::Get { key: next() },
        4 => TcpRequest::Add { key: next(), amount: integer(next())? },
        7 => TcpRequest::NumKeys,
        8 => TcpRequest::Delete { key: next() },
        9 => TcpRequest::Append { key: next(), value: TcpValue(Arc::new(next())) },
        12 => TcpRequest::CancelWait,
        13 => TcpRequest::Ping { nonce: next().try_into().ok()? },
        14 => TcpRequest::QueuePush { key: next(), value: TcpValue(Arc::new(next())) },
        15 => TcpRequest::QueuePop { key: next() },
        16 => TcpRequest::QueueLen { key: next() },
        17 => TcpRequest::ListKeys,
        18 => TcpRequest::Barrier { key: next(), world_size: integer(next())? },
        _ => return None,
    })
}

/// Reads a number, little-endian as PyTorch's clients send it.
fn integer(field: Vec<u8>) -> Option<i64> {
    Some(i64::from_le_bytes(field.try_into().ok()?))
}

fn array<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (array, after) = rest.split_first_chunk()?;
    *rest = after;
    Some(*array)
}

fn invalid() -> io::Error {
    ErrorKind::InvalidData.into()
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn field(bytes: &[u8]) -> Vec<u8> {
        let mut wire = Vec::new();
        put(&mut wire, bytes);
        wire
    }

    /// Any request as it is sent, and what comes out of it.
    fn requests() -> impl Strategy<Value = (Vec<u8>, Vec<TcpRequest>)> {
        let text = || vec(any::<u8>(), 0..20);
        let one = |key: Vec<u8>, value: Vec<u8>, number: i64, operation: u8| {
            let (k, v, n) = (field(&key), field(&value), number.to_le_bytes());
            let value = TcpValue::new(&value);
            let (wire, request) = match operation {
                0 => (vec![&[1][..], &k, &v], TcpRequest::Set { key, value }),
                1 => (
                    vec![&[2][..], &k, &v, &v],
                    TcpRequest::CompareSet { key, expected: value.clone(), desired: value },
                ),
                2 => (vec![&[3][..], &k], TcpRequest::Get { key }),
                3 => (vec![&[4][..], &k, &n], TcpRequest::Add { key, amount: number }),
                4 => (vec![&[7][..]], TcpRequest::NumKeys),
                5 => (vec![&[8][..], &k], TcpRequest::Delete { key }),
                6 => (vec![&[9][..], &k, &v], TcpRequest::Append { key, value }),
                7 => (vec![&[12][..]], TcpRequest::CancelWait),
                8 => (
                    vec![&[13][..], &n[..4]],
                    TcpRequest::Ping { nonce: n[..4].try_into().unwrap() },
                ),
                9 => (vec![&[14][..], &k, &v], TcpRequest::QueuePush { key, value }),
                10 => (vec![&[15][..], &k], TcpRequest::QueuePop { key }),
                11 => (vec![&[16][..], &k], TcpRequest::QueueLen { key }),
                12 => (vec![&[17][..]], TcpRequest::ListKeys),
                _ => (vec![&[18][..], &k, &n], TcpRequest::Barrier { key, world_size: number }),
            };
            (wire.concat(), vec![request])
        };
        let single =
            (text(), text(), any::<i64>(), 0..14u8).prop_map(move |(k, v, n, o)| one(k, v, n, o));
        let many = (vec((text(), text()), 0..5), 0..4usize).prop_map(|(pairs, kind)| {
            let count = (pairs.len() as u64).to_le_bytes();
            let mut wire = [&[[5, 6, 10, 11][kind]][..], &count].concat();
            for (key, value) in &pairs {
                put(&mut wire, key);
                if kind == 3 {
                    put(&mut wire, value);
                }
            }
            let keys = || pairs.iter().map(|(key, _)| key.clone());
            let requests = match kind {
                0 => vec![TcpRequest::Check { keys: keys().collect() }],
                1 => vec![TcpRequest::Wait { keys: keys().collect() }],
                2 => vec![TcpRequest::MultiGet { keys: keys().collect() }],
                _ => pairs
                    .iter()
                    .map(|(key, value)| TcpRequest::Set {
                        key: key.clone(),
                        value: TcpValue::new(value),
                    })
                    .collect(),
            };
            (wire, requests)
        });
        prop_oneof![single, many]
    }

    /// Decodes requests from pieces that arrive one after the other.
    fn decode(pieces: &[&[u8]]) -> io::Result<Vec<TcpRequest>> {
        let (mut decoder, mut input, mut requests) = (Decoder::default(), Vec::new(), Vec::new());
        for piece in pieces {
            input.extend_from_slice(piece);
            loop {
                let (taken, request) = decoder.decode(&input)?;
                input.drain(..taken);
                requests.extend(request);
                if taken == 0 {
                    break;
                }
            }
        }
        assert!(input.len() < 8 + MAX_VALUE as usize);
        Ok(requests)
    }

    proptest! {
        #[test]
        fn requests_come_out_of_any_pieces(all in vec(requests(), 0..8), size in 1..40usize) {
            let wire: Vec<u8> = all.iter().flat_map(|(wire, _)| wire.clone()).collect();
            let expected: Vec<TcpRequest> =
                all.into_iter().flat_map(|(_, requests)| requests).collect();
            prop_assert_eq!(&decode(&wire.chunks(size).collect::<Vec<_>>()).unwrap(), &expected);
            prop_assert_eq!(decode(&[&wire]).unwrap(), expected);
        }

        #[test]
        fn garbage_is_an_error_or_waits_for_more(bytes in vec(any::<u8>(), 0..300)) {
            let whole = decode(&[&bytes]).map_err(|error| error.kind());
            let pieces = decode(&bytes.chunks(1).collect::<Vec<_>>()).map_err(|error| error.kind());
            prop_assert_eq!(whole, pieces);
        }
    }

    #[test]
    fn limits_are_those_of_pytorch() {
        for (head, most) in [(&[3][..], MAX_KEY), (&[5], MAX_COUNT), (&[11], MAX_COUNT)] {
            let wire = |length: u64| [head, &length.to_le_bytes()].concat();
            assert!(decode(&[&wire(most)]).unwrap().is_empty());
            assert_eq!(decode(&[&wire(most + 1)]).unwrap_err().kind(), ErrorKind::InvalidData);
        }
        let wire = |length: u64| [&[1][..], &field(b"key"), &length.to_le_bytes()].concat();
        assert!(decode(&[&wire(MAX_VALUE)]).unwrap().is_empty());
        assert!(decode(&[&wire(MAX_VALUE + 1)]).is_err());
        for operation in [0, 19, 255] {
            assert!(decode(&[&[operation]]).is_err());
        }
    }

    #[test]
    fn values_grow() {
        let mut value = TcpValue::new(b"ab");
        let before = value.clone();
        value.append(&TcpValue::new(b"cd"));
        assert_eq!((value, before.bytes()), (TcpValue::new(b"abcd"), &b"ab"[..]));
    }
}
