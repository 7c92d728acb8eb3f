from plsc.storage.retry import reason_of


def test_a_fault_of_hdfs_is_told_without_the_stack_of_its_server() -> None:
    client = (
        'RPCError("org.apache.hadoop.security.AccessControlException", "Permission denied: user=a'
        "\\n\\tat org.apache.hadoop.hdfs.server.namenode.FSPermissionChecker.check(FS.java:400)"
    )
    reason = reason_of(RuntimeError(client))
    assert reason.endswith("Permission denied: user=a")
    assert "FSPermissionChecker" not in reason
    assert "FSPermissionChecker" not in reason_of(
        RuntimeError(client.encode().decode("unicode_escape"))
    )
