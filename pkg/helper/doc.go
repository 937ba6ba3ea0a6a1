// Package helper is the unprivileged process that runs one FUSE client, and the driver's way of talking to it.
//
// A launcher starts `s3-csi-driver helper --name <name> --state-dir <dir>` under the mount's own uid, with a listening
// UNIX stream socket as descriptor 0. The helper answers the driver on that socket (wire.go), runs the client in the
// foreground (process.go), hands it credentials on a loopback endpoint (endpoint.go), keeps the end of its output
// (tail.go) and outlives it: when the client ends, the helper says how, keeps the keys, and can start another one on a
// new FUSE descriptor. The end of a mount also rests in the state directory (end.go).
//
// It keeps the client's session alive without the driver (session.go decides when, renew.go does it): from the order that
// it was given it makes each session ahead of the end of the one before, with a program that runs for that (exchange.go).
// The old session is served for as long as it is valid, failures are repeated and told in the status, and all goes on
// while the mount drains, until the client has exited.
//
// The helper lives as long as it is of use (lifetime.go):
//
//   - With a running client it ignores SIGTERM, SIGINT and SIGHUP and ends only for a quit request. A SIGTERM that came
//     meanwhile is remembered: the helper ends when its client does.
//   - Told that the mount is ending, it goes once the client has ended well and somebody has read the final status, at
//     the latest a minute after; mount.exit stays on disk for whoever asks later. After a bad end it stays: a client that
//     left something undone can be started once more.
//   - Never given a client and asked nothing for two minutes, it goes.
//   - After an unexpected exit of the client it stays, however long the driver is away.
//
// It logs plain lines to its standard error, time first; what the client prints is repeated there. Where that is a
// regular file it is kept below maxLog bytes. Keys and orders are only ever in its memory, and in that of the program that
// makes sessions: neither process is dumpable. The client, which has the same uid, gets at them only through the endpoint,
// whose token is in its environment and random: nobody finds out by trying, and no other user can read it. Which user a
// request of the endpoint comes from is not looked at: the kernel tells that of a TCP connection only in a table of all
// connections of the machine, which takes milliseconds to read, or over sockets that the sandbox forbids.
//
// The package imports little on purpose: a node runs one helper per mount.
package helper
