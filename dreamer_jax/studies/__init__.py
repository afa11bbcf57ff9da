"""Many runs compared: what no single run says."""
