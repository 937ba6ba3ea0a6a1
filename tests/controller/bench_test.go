package controller

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime/metrics"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/copier"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// BenchmarkVolumes makes and deletes volumes, warm, and counts requests and sessions: what scope costs the controller.
func BenchmarkVolumes(b *testing.B) {
	for _, c := range []struct{ name, scope string }{{"", ""}, {"-scoped", ""}, {"-scoped-required", "required"}} {
		for i, target := range targets {
			if c.name != "" {
				target = scoped[i]
			}
			b.Run(target.name+c.name, func(b *testing.B) {
				if target.skip != "" {
					b.Skip(target.skip)
				}
				e := newEnv(b, target)
				p := e.process()
				pairs := []string{"scope", c.scope}
				p.delete(p.create("warm", pairs...))
				p.hooks.reset()
				before, made, requests := len(p.sessions.made()), time.Duration(0), 0
				b.ResetTimer()
				for n := range b.N {
					began := time.Now()
					id := p.create(fmt.Sprint("v-", n), pairs...)
					made += time.Since(began)
					requests += len(p.hooks.sent())
					p.delete(id)
					p.hooks.reset()
				}
				b.ReportMetric(float64(made.Microseconds())/float64(b.N)/1000, "ms/create")
				b.ReportMetric((float64(b.Elapsed().Microseconds())-float64(made.Microseconds()))/float64(b.N)/1000, "ms/delete")
				b.ReportMetric(float64(requests)/float64(b.N), "requests/create")
				b.ReportMetric(float64(len(p.sessions.made())-before)/float64(b.N), "sessions/op")
			})
		}
	}
}

// BenchmarkDeleteEmpty deletes 1,000 empty volumes, 32 at a time, where a request takes 30 ms or more. total/request is how many times
// as long as one request all deletions took: 1000 ÷ 32 × 4 = 125, if no deletion waits for anything but its four round trips.
func BenchmarkDeleteEmpty(b *testing.B) {
	const volumes, atOnce, latency = 1000, 32, 30 * time.Millisecond
	for _, target := range targets {
		b.Run(target.name, func(b *testing.B) {
			if target.skip != "" {
				b.Skip(target.skip)
			}
			e := newEnv(b, target)
			p := e.process(func(o *processOptions) { o.runs, o.workers = provision.DefaultRuns, provision.DefaultWorkers })
			p.delete(p.create("warm"))
			all := func(round int, do func(name string) error) {
				b.Helper()
				names := make(chan string)
				go func() {
					defer close(names)
					for i := range volumes {
						names <- fmt.Sprint("v", round, "-", i)
					}
				}()
				for _, err := range race(atOnce, func(int) (err error) {
					for name := range names {
						err = errors.Join(err, do(name))
					}
					return err
				}) {
					if err != nil {
						b.Fatal(err)
					}
				}
			}
			for n := range b.N {
				b.StopTimer()
				p.hooks.set(func(h *hooks) { h.wait = nil })
				all(n, func(name string) error { return p.tryCreate(name) })
				p.hooks.reset()
				p.slow(latency)
				b.StartTimer()
				began := time.Now()
				all(n, func(name string) error { return p.tryDelete(e.params(name).ID(name, 1)) })
				total := time.Since(began)
				b.StopTimer()
				p.hooks.set(func(h *hooks) {
					request := h.took / time.Duration(len(h.log))
					b.ReportMetric(float64(total)/float64(request), "total/request")
					b.ReportMetric(float64(request.Microseconds())/1000, "request-ms")
					b.ReportMetric(float64(len(h.log))/volumes, "requests/delete")
					b.ReportMetric(volumes/total.Seconds(), "deletes/s")
				})
			}
		})
	}
}

// slow makes every request of a process take at least that long.
func (p *process) slow(d time.Duration) {
	p.hooks.set(func(h *hooks) {
		h.wait = func(_ context.Context, _ string, done bool) {
			if !done {
				time.Sleep(d)
			}
		}
	})
}

// BenchmarkSnapshot makes snapshots of 10,000 and of SNAPSHOT_OBJECTS (100,000) objects. requests/needed is the number of requests ÷ objects and
// pages of 1000, which must not be above 1.05. heap-MiB is the most that was in use, and does not grow with the objects. rate/bare compares with
// a loop over the SDK that lists and copies with as many requests in flight; with -benchtime 3x, say, they take turns. In the last one each request
// takes 30 ms or more, as to a service that is not on this machine.
func BenchmarkSnapshot(b *testing.B) {
	most := 100_000
	if s := os.Getenv("SNAPSHOT_OBJECTS"); s != "" {
		var err error
		if most, err = strconv.Atoi(s); err != nil {
			b.Fatal(err)
		}
	}
	const latency = 30 * time.Millisecond
	for _, c := range []struct {
		objects int
		wait    time.Duration
		targets []target
	}{{most / 10, 0, targets}, {most, 0, targets}, {most / 10, latency, targets[:1]}} {
		for _, target := range c.targets {
			objects, name := c.objects, fmt.Sprint(target.name, "-", c.objects)
			if c.wait > 0 {
				name += "-" + c.wait.String()
			}
			b.Run(name, func(b *testing.B) {
				if target.skip != "" {
					b.Skip(target.skip)
				}
				e := newEnv(b, target)
				p := e.process()
				source := p.create("v")
				for some := range slices.Chunk(numbered(source.Prefix, objects), 5000) {
					e.put(some...)
				}
				loop := p.copying(func(o *copier.Options) { o.Workers = provision.DefaultCopyWorkers })
				p.slow(c.wait)
				params, err := volume.ParseSnapshotParameters(nil)
				if err != nil {
					b.Fatal(err)
				}
				var took, bare time.Duration
				heap, requests := uint64(0), 0
				p.hooks.set(func(h *hooks) { h.counts = true })
				for n := range b.N {
					bare += loop.bareLoop(source.Prefix, fmt.Sprint("bare", n, "/"))
					p.hooks.set(func(h *hooks) { h.count = 0 })
					used := peak()
					began := time.Now()
					for {
						s, err := p.CreateSnapshot(p.life, provision.SnapshotRequest{Name: fmt.Sprint("s", n), Source: source, Parameters: params, Keys: e.keys})
						if err == nil && s.Objects == int64(objects) {
							break
						}
						if !fault.Is(err, fault.Busy) {
							b.Fatal(s, err)
						}
					}
					took += time.Since(began)
					heap = max(heap, used())
					p.hooks.set(func(h *hooks) { requests = max(requests, h.count) })
				}
				ratio := float64(requests) / float64(objects+(objects+999)/1000)
				if ratio > 1.05 {
					b.Errorf("%d requests for %d objects", requests, objects)
				}
				b.ReportMetric(ratio, "requests/needed")
				b.ReportMetric(float64(heap)/(1<<20), "heap-MiB")
				b.ReportMetric(float64(b.N*objects)/took.Seconds(), "objects/s")
				b.ReportMetric(bare.Seconds()/took.Seconds(), "rate/bare")
			})
		}
	}
}

// peak measures the heap until the function is called that it returns, which returns the most that was in use after a garbage collection.
func peak() func() uint64 {
	stop, most := make(chan struct{}), make(chan uint64)
	go func() {
		var highest uint64
		live := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
		for {
			metrics.Read(live)
			highest = max(highest, live[0].Value.Uint64())
			select {
			case <-stop:
				most <- highest
				return
			case <-time.After(50 * time.Millisecond):
			}
		}
	}()
	return func() uint64 {
		close(stop)
		return <-most
	}
}
