package faults

import "slices"

// lingerOff are the flags of a driver whose mounts do not linger.
var lingerOff = []string{"--linger-max-mounts=0"}

// lingering has the scenario's mount linger, and ends that when the operation is over.
func (c *scenario) lingering(operation func()) {
	c.t.Helper()
	c.volume.VolumeContext["linger"] = "1h"
	if c.flags != nil {
		c.flags = nil
		c.restart(c.t)
	}
	operation()
	c.flags = lingerOff
	c.restart(c.t)
}

// The last publication goes, and its mount lingers for another.
func lingerOperation(c *scenario) {
	c.lingering(func() {
		c.publish(c.target)
		c.write("before", "written before it")
		clients := c.pids()
		c.arm()
		asked := c.begin(c.unpublishing(c.target), false)
		c.strike()
		c.must("unpublishing", asked)
		c.storedAlready("before")
		c.publish(c.target)
		c.works()
		if now := c.pids(); c.fault == killDriver && !slices.Equal(now, clients) {
			c.t.Errorf("the clients %v are %v: the mount did not linger", clients, now)
		}
	})
}

// The same, for a mount whose credentials are a secret's.
func lingerSecretOperation(c *scenario) {
	c.secrets, _ = c.rotation()
	lingerOperation(c)
}

// A lingering mount is published.
func warmOperation(c *scenario) {
	c.lingering(func() {
		c.publish(c.target)
		c.write("before", "written before it")
		clients := c.pids()
		c.unpublish(c.target)
		c.arm()
		asked := c.begin(c.publishing(c.target), c.fault == podGone)
		c.strike()
		if c.fault == podGone {
			c.t.Log("what the CO gave up: ", <-asked)
			c.unpublish(c.target)
			return
		}
		c.must("publishing", asked)
		c.works()
		if now := c.pids(); c.fault == killDriver && !slices.Equal(now, clients) {
			c.t.Errorf("the clients %v are %v: the mount did not linger", clients, now)
		}
	})
}

// A driver ends a lingering mount.
func lingerEndOperation(c *scenario) {
	c.lingering(func() {
		c.publish(c.target)
		c.write("before", "written before it")
		c.unpublish(c.target)
		c.storedAlready("before")
		c.driver.Load().Kill()
		c.flags = lingerOff
		c.release()
		c.arm()
		c.drive(c.t)
		c.strike()
		if c.fault != podGone {
			c.publish(c.target)
			c.works()
		}
	})
}

// pids are those of the scenario's clients.
func (c *scenario) pids() (pids []int) {
	for _, p := range c.processes(programs[c.client]) {
		pids = append(pids, p.PID)
	}
	slices.Sort(pids)
	return pids
}

// storedAlready fails the test unless a file is in the bucket.
func (c *scenario) storedAlready(name string) {
	c.t.Helper()
	if key := c.volume.GetVolumeId() + "/" + name; len(c.server.Keys(c.t, bucket, key)) == 0 {
		c.t.Errorf("%s is not stored, and the volume is unpublished", name)
	}
}
