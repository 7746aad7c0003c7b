"""Calls all methods of a TCPStore's clients and prints what comes of it: the same, whoever serves the store.

    store_methods.py USE_LIBUV [HOST PORT]

Without an address, PyTorch's own server is started.
"""

import datetime
import sys
import threading

from torch.distributed import PrefixStore, QueueEmptyError, TCPStore

SOON, LATE = datetime.timedelta(milliseconds=100), datetime.timedelta(seconds=60)
use_libuv = sys.argv[1] == "1"
if len(sys.argv) > 2:
    host, port = sys.argv[2], int(sys.argv[3])
else:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=use_libuv)
    host, port = "127.0.0.1", server.port


def client():
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=LATE, use_libuv=use_libuv)


def show(name, call, *args):
    """Prints the result of a call, or its error."""
    try:
        print(name, "->", call(*args))
        if store := getattr(call, "__self__", None):
            # What has no reply has been done when this has one.
            store.num_keys()
    except Exception as error:
        # Where in C++ it was raised, and at which port, is no matter.
        what = str(error).splitlines()[0] if "timeout after" in str(error) else ""
        print(name, "raises", type(error).__name__, what)


def waits(call, *args):
    """Calls in a thread; returns what waits for the result."""
    results = []
    thread = threading.Thread(target=lambda: results.append(call(*args)))
    thread.start()

    def join():
        thread.join(60)
        return results

    return join


store, other = client(), client()

show("set", store.set, "key", "value")
show("get", other.get, "key")
show("set empty", store.set, "empty", "")
show("get empty", other.get, "empty")
show("set bytes", store.set, "bytes", b"\x00\xff\n")
show("get bytes", other.get, "bytes")
show("num_keys", store.num_keys)
show("set large", store.set, "large", b"x" * (8 << 20))
show("large", lambda: other.get("large") == b"x" * (8 << 20))

show("add", store.add, "n", 5)
show("add negative", other.add, "n", -7)
show("get sum", store.get, "n")
show("add to text", client().add, "key", 1)
show("text stays", store.get, "key")
show("set digits", store.set, "digits", " 12abc")
show("add to digits", store.add, "digits", 1)
show("get digits", store.get, "digits")

show("check", store.check, ["key", "n"])
show("check missing", store.check, ["key", "missing"])
show("check none", store.check, [])
show("wait", store.wait, ["key", "n"])
show("wait missing", store.wait, ["key", "missing"], SOON)
show("wait none", store.wait, [], SOON)
show("after a timeout", store.get, "key")

show("compare_set missing, nothing expected", store.compare_set, "c", "", "1")
show("compare_set equal", store.compare_set, "c", "1", "2")
show("compare_set differs", store.compare_set, "c", "1", "3")
show("get compared", other.get, "c")
show("compare_set missing, something expected", store.compare_set, "c2", "1", "2")
show("not set", store.check, ["c2"])
show("compare_set empty", store.compare_set, "empty", "", "filled")

show("delete_key", store.delete_key, "c")
show("delete_key again", store.delete_key, "c")
show("deleted", other.check, ["c"])
show("num_keys", other.num_keys)

show("append to nothing", store.append, "a", "one")
show("append", other.append, "a", "two")
show("get appended", other.get, "a")
show("get appended", store.get, "a")
show("multi_set", store.multi_set, ["m1", "m2", "m3"], ["1", "", "333"])
show("multi_get", other.multi_get, ["m3", "m2", "m1", "key"])
show("multi_get none", other.multi_get, [])
show("num_keys", store.num_keys)
show("extended", store.has_extended_api)
if hasattr(store, "list_keys"):
    show("list_keys", lambda: sorted(store.list_keys()))
if hasattr(store, "barrier"):
    show("barrier of one", store.barrier, "b1", 1, LATE)
    show("barrier timeout", store.barrier, "b2", 2, SOON)

show("queue_push", store.queue_push, "q", "first")
show("queue_push", other.queue_push, "q", "second")
show("queue_len", store.queue_len, "q")
show("a queue is no key", store.num_keys)
show("but there", store.check, ["q"])
show("queue_pop", other.queue_pop, "q")
show("queue_pop", store.queue_pop, "q", False)
show("queue_pop empty", store.queue_pop, "q", False)
show("queue_len", store.queue_len, "q")
show("queue_len never used", store.queue_len, "q2")
store.set_timeout(SOON)
show("queue_pop timeout", store.queue_pop, "q")
show("get timeout", store.get, "missing")
store.set_timeout(LATE)

late = waits(other.get, "late")
show("set late", store.set, "late", "here")
print("woken by set", late())
late = waits(other.wait, ["late 1", "late 2", "late 3", "late 4"])
show("add late", store.add, "late 1", 1)
show("append late", store.append, "late 2", "2")
if use_libuv:
    show("compare_set late", store.compare_set, "late 3", "", "3")
else:
    # PyTorch's older server wakes nobody for it.
    show("set late", store.set, "late 3", "3")
show("multi_set late", store.multi_set, ["late 4", "late 5"], ["4", "5"])
print("woken by all", late())
show("delete what nobody has set", store.delete_key, "late again")
late = waits(other.get, "late again")
show("delete what one waits for", store.delete_key, "late again")
show("set again", store.set, "late again", "here")
print("woken", late())
if use_libuv:

    def pop(store, key):
        """PyTorch's client waits for an entry and then asks for one: another may have taken it in between."""
        while True:
            try:
                return store.queue_pop(key)
            except QueueEmptyError:
                pass

    late = [waits(pop, client(), "work") for _ in range(3)]
    for item in ["a", "b", "c"]:
        show("push", store.queue_push, "work", item)
    print("woken by pushes", sorted(join()[0] for join in late))

clone = store.clone()
show("clone", clone.get, "key")
prefix = PrefixStore("prefix", store)
show("prefix set", prefix.set, "key", "prefixed")
show("prefix get", prefix.get, "key")
show("as the store sees it", other.get, "prefix/key")
show("prefix add", prefix.add, "n", 1)
show("prefix in prefix", PrefixStore("inner", prefix).set, "key", "inner")
show("as the store sees it", other.get, "prefix/inner/key")
show("prefix delete", prefix.delete_key, "key")
show("num_keys", store.num_keys)
