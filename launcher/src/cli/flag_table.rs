//! The table of all flags: `--help`, completions, the manual page and docs/flags.md come from it.

use super::flag::{Flag, List, Switch, Valued, option, switch};

const WORKERS: &str = "Workers";
const PROGRAM: &str = "Program";
const NODES: &str = "Nodes";
const OUTPUT: &str = "Output";
const HELP: &str = "Help";

/// Makes a constant of each flag, by which the code reads it, and the table of all.
macro_rules! flags {
    ($($kind:ident $name:ident = $flag:expr;)*) => {
        $(pub const $name: $kind = $kind(&$flag);)*

        /// All flags, in the order of the pages.
        pub const FLAGS: &[&Flag] = &[$($name.0),*];
    };
}

flags! {
    Valued NPROC_PER_NODE = option(WORKERS, "nproc-per-node", "N", "Workers on this node: a number, auto, cpu or gpu")
        .words(&["auto", "cpu", "gpu"])
        .short('n')
        .default("1")
        .meaning(
            "workers on this node: a number, `gpu`, `cpu`, or `auto` (one per GPU if there are \
             any, else one per CPU); mpirun's `-np`, `-np2`, `-np=2` too",
        )
        .differs("`cpu` respects affinity and cgroup limits; no `xpu`");
    Valued MAX_RESTARTS = option(WORKERS, "max-restarts", "N", "Starts after a failure")
        .default("0")
        .meaning("how often a failed job is started again");
    Valued ELASTIC = option(WORKERS, "elastic", "KIND", "After a failure: restart all, or in-place")
        .words(&["restart", "in-place"])
        .without_variable()
        .default("restart")
        .meaning(
            "after a failure: `restart` starts all workers again. `in-place` starts the failed one \
             again alone, and the others go on: [elastic.md](elastic.md). `--max-restarts` counts \
             all of these",
        )
        .differs("not in torchrun");
    Valued MIN_WORKERS = option(WORKERS, "min-workers", "N", "In place: fewest workers to go on with")
        .without_variable()
        .default("all")
        .meaning(
            "with `--elastic in-place`: the job goes on without a worker that cannot be started again, \
             if so many are left",
        )
        .differs("not in torchrun");
    Valued SHUTDOWN_TIMEOUT = option(WORKERS, "shutdown-timeout", "SECONDS", "From SIGTERM to SIGKILL; also --grace")
        .alias(&["grace"])
        .default("30")
        .meaning(
            "seconds between asking workers to stop and killing them; the variable \
             `TORCH_ELASTIC_SHUTDOWN_TIMEOUT` too",
        )
        .differs(
            "also applies after a failure and before a restart, where torchrun always waits 30",
        );
    Valued HANG_TIMEOUT = option(WORKERS, "hang-timeout", "SECONDS", "Longest wait in a collective, or to join")
        .without_variable()
        .default("none")
        .meaning(
            "longest wait, in seconds, in one collective of Flow or for joining its process group; \
             a longer wait is a failure. Over NCCL it includes earlier work of the GPU",
        )
        .differs("not in torchrun");
    Valued SIGNALS_TO_HANDLE = option(WORKERS, "signals-to-handle", "NAMES", "Passed on to workers")
        .default("SIGTERM,SIGINT,SIGHUP,SIGQUIT")
        .meaning(
            "signals to pass on to the workers, once each; names that are unknown or cannot be \
             caught are skipped with a warning",
        )
        .differs("names without SIG too");
    Valued STDIN = option(WORKERS, "stdin", "WHO", "Who reads the input: all, none or a rank")
        .words(&["all", "none"])
        .without_variable()
        .default("Python all, others 0")
        .meaning(
            "which workers read flow-launch's standard input: `all`, `none` or a rank; the others \
             read nothing. If several ranks prompt (`breakpoint()` in all), give 0. With `--hosts` \
             only `none`",
        )
        .differs("not in torchrun, where all do");
    Valued NUMA_BINDING = option(WORKERS, "numa-binding", "KIND", "Cores for each: node, socket, exclusive or \
                                             core-complex")
        .words(&["node", "socket", "exclusive", "core-complex"])
        .without_variable()
        .meaning("CPUs of each worker: `node`, `socket`, `exclusive` or `core-complex`, see below")
        .differs("for workers without a GPU too; needs no `numactl`");
    Switch VIRTUAL_LOCAL_RANK = switch(WORKERS, "virtual-local-rank", "Each sees one GPU, its own, and LOCAL_RANK 0")
        .meaning(
            "every worker gets LOCAL_RANK 0 and sees one GPU, its own, by CUDA_VISIBLE_DEVICES",
        );
    Valued ROLE = option(WORKERS, "role", "NAME", "Workers get it as ROLE_NAME")
        .default("default")
        .meaning("workers get it as ROLE_NAME");
    Switch MODULE = switch(PROGRAM, "module", "PROGRAM is a Python module")
        .short('m')
        .meaning("`python3 -u -m PROGRAM`: PROGRAM is a Python module");
    Switch NO_PYTHON = switch(PROGRAM, "no-python", "PROGRAM runs as it is, even if its name ends in .py")
        .meaning("execute PROGRAM itself")
        .differs("only needed for what Python alone can run: a binary needs no flag");
    Switch RUN_PATH = switch(PROGRAM, "run-path", "PROGRAM is a Python script, whatever its name")
        .meaning("PROGRAM is a Python script, whatever its name; overrides `--no-python`")
        .differs("runs in a process of its own, `python3 -u PROGRAM`; an error with `--module`");
    Valued NNODES = option(NODES, "nnodes", "N|MIN:MAX", "Nodes in the job")
        .default("1")
        .meaning("number of nodes, or MIN:MAX")
        .differs("MIN below MAX needs `--rdzv-endpoint`");
    Valued NODE_RANK = option(NODES, "node-rank", "N", "This node, from 0, where --master-addr names node 0")
        .default("0")
        .meaning("rank of this node; ignored, with a warning, if nodes meet at an endpoint")
        .differs("must be below `--nnodes`");
    Valued MASTER_ADDR = option(NODES, "master-addr", "HOST", "Address of node 0")
        .default("127.0.0.1 for one node")
        .meaning("host of node 0")
        .differs("several nodes need it, or `--rdzv-endpoint`");
    Valued MASTER_PORT = option(NODES, "master-port", "PORT", "Port on node 0")
        .default("29500; for one node a free one")
        .meaning("port on node 0: for its agent, Flow's store and PyTorch's")
        .differs("one port serves all");
    Valued RDZV_ENDPOINT = option(NODES, "rdzv-endpoint", "HOST[:PORT]", "Where nodes meet, in any order [default port: \
                                                   29400]")
        .meaning(
            "where nodes meet: `HOST`, `HOST:PORT`, `[V6]` or `[V6]:PORT`; the default port is \
             29400",
        )
        .differs("implies `--rdzv-backend c10d`");
    Valued RDZV_BACKEND = option(NODES, "rdzv-backend", "KIND", "static or c10d")
        .words(&["static", "c10d"])
        .default("static; c10d with an endpoint")
        .meaning(
            "`static`: node 0 is at `--master-addr`, or at the endpoint. `c10d`: nodes meet at the \
             endpoint, in any order",
        )
        .differs(
            "keeps torchrun's names, with Flow's own store; no `etcd`, as no service is needed",
        );
    Valued RDZV_ID = option(NODES, "rdzv-id", "ID", "Identifies this job")
        .default("none; for one node a new one")
        .meaning("identifies the job; workers get it as TORCHELASTIC_RUN_ID");
    Valued RDZV_CONF = option(NODES, "rdzv-conf", "KEY=VALUE,...", "join_timeout, last_call_timeout, \
                                                 heartbeat_timeout, is_host")
        .meaning("`KEY=VALUE,...`, see below")
        .differs("an unknown key is a warning");
    Switch STANDALONE = switch(NODES, "standalone", "One node, whatever the other flags say")
        .meaning("one node; endpoint, backend, id, `--master-addr` and `--master-port` are ignored")
        .differs("an error with `--nnodes 2`");
    Valued LOCAL_ADDR = option(NODES, "local-addr", "HOST", "Address at which others reach this node")
        .meaning("address at which other nodes reach this one");
    Valued HOSTS = option(NODES, "hosts", "HOST[:N],...", "Start a node with N workers on each, by ssh; also \
                                            --host")
        .alias(&["host"])
        .without_variable()
        .meaning(
            "`HOST[:N],...`: start a node on each of these hosts by ssh, with N workers; see \
             [several-machines.md](several-machines.md)",
        )
        .differs("not in torchrun; as mpirun's");
    Valued HOSTFILE = option(NODES, "hostfile", "FILE", "The same; a line is HOST, HOST:N or HOST slots=N")
        .without_variable()
        .meaning("the same from a file, with `HOST`, `HOST:N` or `HOST slots=N` a line")
        .differs("not in torchrun");
    List EXPORT = option(NODES, "export", "NAME[=VALUE]", "A variable for all hosts, beside FLOW_*, NCCL_* and \
                                             the like")
        .short('x')
        .list()
        .without_variable()
        .meaning("`NAME` or `NAME=VALUE`: a variable for all hosts; may be repeated")
        .differs("not in torchrun; as mpirun's");
    Valued RSH = option(NODES, "rsh", "COMMAND", "In place of ssh, with its options; or FLOW_RSH")
        .without_variable()
        .default("ssh")
        .meaning(
            "command that starts a program on a host, with its options; the variable `FLOW_RSH` \
             too",
        )
        .differs("not in torchrun");
    Switch PREFIX = switch(OUTPUT, "prefix", "Put the rank before each line")
        .without_variable()
        .default("on a terminal")
        .meaning("put the rank before each line")
        .differs("not in torchrun");
    Valued LOG_DIR = option(OUTPUT, "log-dir", "DIR", "For the files of --redirects and --tee")
        .meaning("folder for files of output and errors; `/dev/null` for none");
    Valued REDIRECTS = option(OUTPUT, "redirects", "STREAMS", "To files: 0 none, 1 stdout, 2 stderr, 3 both; or by \
                                            rank 0:3,10:1")
        .words(&["0", "1", "2", "3"])
        .short('r')
        .alias(&["redirect"])
        .default("0")
        .meaning(
            "write to files instead of the console: 0 none, 1 stdout, 2 stderr, 3 both, or by \
             local rank: `0:3,10:1`",
        )
        .differs("any number of digits");
    Valued TEE = option(OUTPUT, "tee", "STREAMS", "To files and here; STREAMS as above")
        .words(&["0", "1", "2", "3"])
        .short('t')
        .default("0")
        .meaning("write to files and to the console; values as for `--redirects`")
        .differs("any number of digits");
    Valued LOG_LINE_PREFIX_TEMPLATE = option(OUTPUT, "log-line-prefix-template", "TEXT", "Before each line of --tee")
        .default("[${role_name}${local_rank}]:")
        .meaning(
            "what to put before each line that is tee'd, with `${role_name}`, `${local_rank}`, \
             `${rank}` and `${hostname}`; `$$` is a dollar sign. The variable \
             `TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE` too",
        );
    Valued LOCAL_RANKS_FILTER = option(OUTPUT, "local-ranks-filter", "RANKS", "Show only these: 0,2")
        .default("all")
        .meaning("local ranks to show on the console: `0,2`; files are written for all");
    Valued DUPLICATE_STDOUT_FILTERS = option(OUTPUT, "duplicate-stdout-filters", "TEXTS", "Copy lines with one of a,b to \
                                                         filtered_stdout.log")
        .meaning(
            "copy lines that contain one of these texts to `filtered_stdout.log`; `,,` is a comma \
             in a text",
        )
        .differs("empty texts are ignored");
    Valued DUPLICATE_STDERR_FILTERS = option(OUTPUT, "duplicate-stderr-filters", "TEXTS", "Copy lines with one of a,b to \
                                                         filtered_stderr.log")
        .meaning("the same for `filtered_stderr.log`");
    Switch REDIRECT_STDOUT_AND_STDERR = switch(OUTPUT, "redirect-stdout-and-stderr", "OneFlow's --redirects 3")
        .without_variable()
        .meaning(
            "OneFlow's: write all output to `LOGDIR/local_rank_N/stdout` and `stderr`, and set \
             `GLOG_log_dir`",
        );
    Valued LOGDIR = option(OUTPUT, "logdir", "DIR", "OneFlow's --log-dir")
        .without_variable()
        .default("log")
        .meaning("OneFlow's: the folder for that")
        .differs("not together with `--log-dir`");
    Valued EVENTS = option(OUTPUT, "events", "FILE", "Append events to it, a JSON object a line")
        .without_variable()
        .meaning(
            "append events to this file, a JSON object a line; see \
             [launcher.md](launcher.md#events)",
        )
        .differs("not in torchrun");
    Valued TRACE = option(OUTPUT, "trace", "FILE", "Write a timeline of all ranks, for Perfetto and flow-launch \
                                     trace")
        .without_variable()
        .meaning(
            "write the timeline of all ranks of all nodes to this file on the leading node; give \
             it on every node. See [launcher.md](launcher.md#traces)",
        )
        .differs("not in torchrun");
    Switch TOP = switch(OUTPUT, "top", "Show at the foot of the terminal what the job does")
        .without_variable()
        .meaning(
            "show what the job does, as `flow-launch top` does, at the foot of the terminal, which standard \
             error must be; the output scrolls above. With `--hosts` too",
        )
        .differs("not in torchrun");
    Switch QUIET = switch(OUTPUT, "quiet", "Print errors only")
        .short('q')
        .without_variable()
        .meaning(
            "flow-launch prints errors only: failure reports, what follows a signal, expired \
             watchdog timers; no warnings and no notices of threads, missing nodes and restarts",
        )
        .differs("not in torchrun");
    Switch DRY_RUN = switch(OUTPUT, "dry-run", "Print what would be started")
        .without_variable()
        .meaning("print each worker's CPUs, environment and command, and start nothing")
        .differs("not in torchrun");
    Valued EVENT_LOG_HANDLER = option(OUTPUT, "event-log-handler", "NAME", "")
        .default("null")
        .meaning("accepted (`null`, `console`, `dynamic_rendezvous`) and ignored: use `--events`")
        .differs("torchrun writes its events there");
    Valued LOGS_SPECS = option(OUTPUT, "logs-specs", "NAME", "")
        .without_variable()
        .default("default")
        .meaning("refused: a plug-in of torchrun")
        .differs("flow-launch has no plug-ins");
    Valued MONITOR_INTERVAL = option(WORKERS, "monitor-interval", "SECONDS", "")
        .meaning("accepted and ignored")
        .differs("flow-launch does not poll");
    Valued START_METHOD = option(WORKERS, "start-method", "NAME", "")
        .default("spawn")
        .meaning("accepted (`spawn`, `fork`, `forkserver`) and ignored")
        .differs("workers are always programs of their own");
    Switch USE_ENV = switch(PROGRAM, "use-env", "")
        .without_variable()
        .meaning("accepted and ignored, from the old `torch.distributed.launch`")
        .differs("the local rank is always in LOCAL_RANK, never an argument");
    Valued COMPLETIONS = option(HELP, "completions", "SHELL", "Print completions for bash, zsh, fish, elvish or \
                                          powershell")
        .alias(&["print-completion"])
        .words(&["bash", "zsh", "fish", "elvish", "powershell"])
        .without_variable()
        .meaning(
            "print a script that completes flow-launch's command line in this shell: `bash`, \
             `zsh`, `fish`, `elvish` or `powershell`",
        )
        .differs("torchrun's `--print-completion`; no `tcsh`, and needs no `shtab`");
    Switch MAN = switch(HELP, "man", "Print the manual page: flow-launch --man | man -l -")
        .without_variable()
        .meaning("print the manual page, for `man -l -`")
        .differs("not in torchrun");
}
