"""What this machine can do at most, as tfm bench measures it: python limits.py THREADS prints it as JSON.

In a process of its own, because it takes half a gigabyte for a moment.
"""

import json
import sys
from dataclasses import asdict

from tfm.engine import roofline

if __name__ == "__main__":
    roofline.prepare()
    print(json.dumps(asdict(roofline.measure_machine(int(sys.argv[1])))))
