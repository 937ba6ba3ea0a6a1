// Package bench measures what a publication by the driver costs compared with the same FUSE client started by hand: time until
// files can be used, throughput, renames, time until all uploads are stored, memory. `make bench` runs it as root, on a machine
// with FUSE.
//
// Each benchmark runs once for each client, as BenchmarkColdPublish/rclone. A client whose program is not built is skipped; -v
// shows the reason. -short runs two rounds, to show that the benchmarks work.
//
// Every comparison is between two ways to the same thing. They take turns in one run, against one S3 server in a process of its own: the
// machine, the server, the program and the data are the same for both, and a change of load affects both. Each number is a median; which of the
// two goes first changes every round.
//
// The bare client (type bare) is the least that anybody has to do to serve a prefix: open /dev/fuse, mount(2), execute the
// client as a user of its own with the argument vector that the driver gives it, credentials in its environment.
// A client that executes fusermount3 is started as root instead, with Debian's fusermount3.
package bench
