"""An engine that serves: requests join and leave a running batch, and a server that speaks to clients over HTTP."""
